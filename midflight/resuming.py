"""Whether a run may start in a folder, or go on there. Nothing is loaded and nothing is written.

Invariant: a run has one recipe from its first step to its last. The learning rate, the questions and the seeds follow
from it, so a resume with another one is refused, never guessed at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from midflight.config import Recipe, resolved
from midflight.errors import UserError
from midflight.recipes import read_yaml, show, validate
from midflight.store.folder import RunFolder


def check_run_folder(path: Path, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder in which `recipe` can neither start nor go on.

    Raises:
        UserError: one line with what to do.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--run-dir {path}: is a file; name a folder")
    if not resume:
        if path.is_dir() and any(path.iterdir()):
            raise UserError(
                f"--run-dir {path}: exists and is not empty; add --resume to go on, or name another --run-dir"
            )
        return
    if not path.is_dir():
        runs = sorted(str(file.parent) for file in Path("runs").glob("*/recipe.yaml"))
        raise UserError(
            f"--resume: {path} does not exist; leave out --resume to start it, or name a run with --run-dir "
            f"(runs here: {', '.join(runs) or 'none'})"
        )
    file = RunFolder(path).recipe
    if not file.is_file():
        raise UserError(f"--resume: {path} holds no recipe.yaml, so no run; name a run with --run-dir")
    change = first_change(resolved(validate(read_yaml(file))), resolved(recipe))
    if change is not None:
        key, was, now = change
        raise UserError(
            f"{key} = {show(now)}: the run in {path} has {show(was)}; a run keeps its recipe: go on with "
            f"midflight train {path} --resume, or start another with --run-dir"
        )


def first_change(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """The first dotted key whose value differs, with both values; None where all are the same."""
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            change = first_change(before, after, f"{prefix}{name}.")
            if change is not None:
                return change
        elif before != after:
            return f"{prefix}{name}", before, after
    return None
