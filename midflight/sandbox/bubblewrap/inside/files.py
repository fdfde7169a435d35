"""Files of a workspace: opened folder by folder from its root, and no symbolic link is followed.

Invariant: no path leads out of the root, whatever other processes change there meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

from . import frames
from .running import WORKSPACE, described

DEEPEST = 100
"""Parts that a path may have; what is deeper is not listed."""
_MOST_LISTED = 2000
_MOST_CHARACTERS = 2**18
"""Of all paths of a list: twelve bytes each, at worst, of a reply."""
_LINK = "a symbolic link, which is not followed"


def answer(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Do what a request says to a file below `root`, which programs know as /workspace; what to reply."""
    try:
        return {"write": _write, "read": _read, "list": _list}[request["kind"]](request, root)
    except (OSError, UnicodeError, ValueError) as error:
        return {"problem": str(error.strerror if isinstance(error, OSError) else error), **described(error)}


@contextlib.contextmanager
def _opened(root: str, path: str, flags: int, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the file at `path` of the workspace; no link is followed on the way or at its end."""
    if path.startswith("/"):
        inside = os.path.relpath(path, WORKSPACE)
        if inside.split("/")[0] == "..":
            raise ValueError(f"{path}: outside the workspace; give a path within it")
        path = inside
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path}: outside the workspace; give a path without ..")
    if len(parts) > DEEPEST:
        raise ValueError(f"a path of {len(parts)} parts; at most {DEEPEST}")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            if make and not last:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=descriptor)
            way = flags | os.O_NONBLOCK if last else os.O_RDONLY | os.O_DIRECTORY
            try:
                inner = os.open(part, way | os.O_NOFOLLOW, 0o644, dir_fd=descriptor)
            except OSError as error:
                reason = _LINK if _is_link(part, descriptor) else error.strerror
                raise OSError(error.errno, f"{'/'.join(parts[: index + 1])}: {reason}") from error
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _write(request: dict[str, Any], root: str) -> dict[str, Any]:
    data = frames.to_bytes(request["data"])
    with _opened(root, request["path"], os.O_WRONLY | os.O_CREAT, make=True) as descriptor:
        _regular(request["path"], descriptor)
        os.ftruncate(descriptor, request["start"])
        if request["executable"]:
            os.fchmod(descriptor, 0o755)
        with open(descriptor, "wb", closefd=False) as file:
            file.seek(request["start"])
            file.write(data)
    return {"bytes": len(data)}


def _read(request: dict[str, Any], root: str) -> dict[str, Any]:
    with _opened(root, request["path"], os.O_RDONLY) as descriptor:
        size, start = _regular(request["path"], descriptor), request["start"]
        if start is None and size > request["most"]:
            raise ValueError(f"{request['path']}: {size} bytes, more than {request['most']}")
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(start or 0)
            return {"data": frames.to_text(file.read(request["most"]))}


def _regular(path: str, descriptor: int) -> int:
    """The size of a regular file; anything else is a ValueError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}")
    return status.st_size


def _list(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Files and links below a folder, by path, from the one behind the first `skip` on; `more`: not all are in it."""
    parts = request["path"].removeprefix(WORKSPACE).split("/")
    prefix = "/".join(part for part in parts if part not in ("", "."))
    found: list[dict[str, Any]] = []
    closed: list[OSError] = []
    skip, room, cut = request["skip"], _MOST_CHARACTERS, False
    with _opened(root, request["path"], os.O_RDONLY | os.O_DIRECTORY) as top:
        for folder, folders, names, descriptor in os.fwalk(".", onerror=closed.append, dir_fd=top):
            inside = (prefix + folder.removeprefix(".")).strip("/")
            names += [name for name in folders if _is_link(name, descriptor)]
            folders[:] = sorted({*folders} - {*names, "__pycache__", ".pytest_cache"})
            if inside.count("/") >= DEEPEST - 2 and folders:
                folders[:], cut = [], True
            for name in sorted(names):
                if skip:
                    skip -= 1
                    continue
                path = f"{inside}/{name}".lstrip("/")
                room -= len(path)
                if len(found) == _MOST_LISTED or room < 0:
                    return {"files": found, "more": True}
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                kind = "file" if stat.S_ISREG(status.st_mode) else "link" if stat.S_ISLNK(status.st_mode) else "other"
                found.append({"path": path, "bytes": status.st_size, "kind": kind})
    return {"files": found, "more": cut or bool(closed)}
