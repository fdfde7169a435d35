"""Which checkpoints of a run are whole.

A checkpoint is a folder `step-N`. Its `state.json`, written last, is its seal: size and SHA-256 of every other file,
and a SHA-256 of itself. Invariant: a sealed folder in which `fault` finds nothing is byte for byte what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from midflight.errors import UserError

STATE = "state.json"
_OWN = ', "sha256": "'


def seal(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state` and the seal beside the files of `folder`, and bring all of it to the disk."""
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in written
    }
    body = json.dumps({**state, "files": files})[:-1]
    (folder / STATE).write_text(f"{body}{_OWN}{_own_sha256(body)}", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        to_disk(path)


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, the seal left out.

    Raises:
        OSError, ValueError: there is none, or it is not what was written.
    """
    return _opened(folder)[0]


def fault(folder: Path, *, contents: bool = True) -> str | None:
    """Why a checkpoint is not whole; None where nothing is wrong.

    Without `contents`, names and sizes alone are compared. Of one without a seal, from an earlier version, the state is
    all that is looked at: see `is_sealed`.
    """
    try:
        _, files = _opened(folder)
        for name, known in (files or {}).items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size} bytes, {known['bytes']} were written"
            if contents and _sha256(path) != known["sha256"]:
                return f"{name} is not what was written (another SHA-256)"
    except FileNotFoundError:
        return f"it has no {STATE}, which is written last"
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return f"{STATE} is damaged ({error})"
    return None


def is_sealed(folder: Path) -> bool:
    """Whether a checkpoint in which there is no fault has a seal."""
    return _opened(folder)[1] is not None


def checkpoint_folders(root: Path) -> list[Path]:
    """All checkpoints under `root`, whole or not, oldest first."""
    return sorted(root.glob("step-*"), key=lambda folder: (len(folder.name), folder.name))


def whole_checkpoints(root: Path) -> list[Path]:
    """The checkpoints under `root` that are whole by names and sizes, oldest first."""
    return [folder for folder in checkpoint_folders(root) if fault(folder, contents=False) is None]


def newest_whole(root: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint under `root` whose every byte was compared; None where there is no checkpoint at all.

    `say` gets one line for each newer one, with what is wrong with it, and one when there is no seal to compare with.

    Raises:
        UserError: there are checkpoints and none is whole.
    """
    folders = checkpoint_folders(root)
    for folder in reversed(folders):
        reason = fault(folder)
        if reason is None:
            if not is_sealed(folder):
                say(f"{folder} is of an earlier version and has no checksums: taken without comparing its files")
            return folder
        if not os.path.lexists(folder):  # its run trains on, and has a newer one
            return newest_whole(root, say)
        say(f"{folder} is not whole, not used: {reason}")
    if folders:
        raise UserError(
            f"{root}: no checkpoint is whole ({', '.join(folder.name for folder in folders)}); put back a copy of one, "
            "or remove them to begin at step 1"
        )
    return None


def _opened(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """State and sealed files of a checkpoint, the state compared with its own SHA-256; see `read_state`."""
    text = (folder / STATE).read_text(encoding="utf-8")
    state = json.loads(text)
    if not isinstance(state, dict) or not {"step", "quality"} <= state.keys():
        raise ValueError("it holds no step")
    if not {"files", "sha256"} & state.keys():
        return state, None
    body, _, own = text.rpartition(_OWN)
    if own != _own_sha256(body):
        raise ValueError("another SHA-256 than was written")
    del state["sha256"]
    return state, state.pop("files")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_sha256(body: str) -> str:
    """What follows `_OWN`: the hash of the text before it, and the end of the object."""
    return hashlib.sha256(body.encode()).hexdigest() + '"}'
