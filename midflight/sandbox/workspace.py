"""The session of one trajectory, as its tools share it: opened at the first request, gone with the trajectory.

Invariant: nothing of it is on the host's disk, unless it is kept; then regular files alone, below a new folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Self

from midflight.errors import InfrastructureError
from midflight.sandbox.base import (
    File,
    Limits,
    ListFiles,
    Python,
    ReadFile,
    Request,
    Sandbox,
    SandboxResult,
    Session,
    WriteFile,
)
from midflight.sandbox.bubblewrap.inside.files import DEEPEST
from midflight.sandbox.bubblewrap.zygote import Box
from midflight.sandbox.options import SandboxOptions

_UNFIT = {
    errno.ENAMETOOLONG: "a path too long for the host",
    errno.EEXIST: "a name that another file has on the host",
    errno.ENOTDIR: "a name that another file has on the host",
    errno.EILSEQ: "a name that the host does not take",
    errno.EINVAL: "a name that the host does not take",
}
"""What a name can be to the host: its file systems may take two names for one, or not take one that is fine inside."""
MOST_KEPT = 256 * 2**20
"""Bytes of a kept workspace: a file with holes takes more on the host than it does inside."""
PIECE = 4 * 2**20
"""Bytes that are read or written of a file at a time, so that a small memory limit is enough."""
MOST_FILES = Box.disk_files - 16
"""Files and folders that a workspace can begin with; a session has some of its own."""
_PAGE = 4096
"""Bytes that a file takes at a time."""


class StartFiles:
    """The regular files below a folder of the host, which workspaces begin with: those of the first time it is read.

    Each has its name below the folder, and whether its owner may execute it; no link is followed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: list[WriteFile] | None = None
        self._reading = threading.Lock()

    def read(self) -> Sequence[WriteFile]:
        """The files, as they are written into a workspace.

        Raises:
            InfrastructureError: one cannot be read; the next call tries again.
        """
        with self._reading:
            if self._read is None:
                try:
                    found = sorted(self._files())
                except OSError as error:
                    raise InfrastructureError(f"agent.sandbox.files: {error}") from error
                self._read = [
                    WriteFile(name, _content(self._folder / name), executable=bool(status.st_mode & stat.S_IXUSR))
                    for name, status in found
                ]
            return self._read

    def problem(self, options: SandboxOptions) -> str:
        """Why a workspace of these options cannot begin with the files, and what to do; empty where it can."""
        folders: set[str] = set()
        count = taken = 0
        try:
            for name, status in self._files():
                parts, size = name.split("/"), status.st_size
                folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
                count, taken = count + 1, taken + -(-size // _PAGE) * _PAGE
                if not os.access(self._folder / name, os.R_OK):
                    return f"{name} cannot be read; change its permissions, or take it out"
                if len(parts) > DEEPEST:
                    return f"{name} has {len(parts)} parts, more than {DEEPEST}; take it out"
                if size > options.file_mb * 2**20:
                    return f"{name} has {size} bytes; raise agent.sandbox.file_mb = {options.file_mb}, or take it out"
                if taken > options.disk_mb * 2**20:
                    return f"more than agent.sandbox.disk_mb = {options.disk_mb} holds; raise it, or take some out"
                if count + len(folders) > MOST_FILES:
                    return f"more than {MOST_FILES} files and folders; take some out"
        except OSError as error:
            return f"{error}; change its permissions, or take it out"
        return ""

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Each by its name below the folder.

        Raises:
            OSError: a folder cannot be listed.
        """
        for place, _, names in os.walk(self._folder, onerror=_raised):
            for path in map(Path(place).joinpath, names):
                if stat.S_ISREG((status := path.lstat()).st_mode):
                    yield path.relative_to(self._folder).as_posix(), status


def _raised(error: OSError) -> None:
    raise error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InfrastructureError(f"agent.sandbox.files: {path}: {error}") from error


def keep_problem(keep: Path) -> str:
    """Why no workspace can be kept in a folder, and what to do; empty where it can, as far as one sees before."""
    there = next(place for place in (keep, *keep.parents) if os.path.exists(place))
    if not os.path.isdir(there):
        return f"{there} is no folder; name one, or leave it out"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written; name another, or leave it out"


class Workspace:
    """Use it as an asynchronous context manager.

    Args:
        sandbox: where it is opened.
        keep: a folder of the host; at the end the files go to its next free `workspace-N`, if there are any, and what
            is left out is said in `workspace-N.left-out`. Where that fails, leaving raises InfrastructureError, and
            the session is closed all the same.
        files: what it begins with.
    """

    def __init__(self, sandbox: Sandbox, keep: Path | None = None, files: StartFiles | None = None) -> None:
        self._sandbox, self._keep, self._files = sandbox, keep, files
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._has_variables = self._forgot = False

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`. A session that was lost is followed by a new one, as the first began.

        Raises:
            InfrastructureError: the sandbox cannot be had, or broke.
        """
        async with self._opening:
            if self._session is None or self._session.lost:
                self._session = await self._filled()
                self._variables(False, self._has_variables)
        result = await self._session.run(request, limits)
        self._variables(result.state_kept, self._has_variables or (isinstance(request, Python) and request.keep_state))
        return result

    def _variables(self, there: bool, before: bool) -> None:
        self._forgot = self._forgot or (before and not there)
        self._has_variables = there

    def forgot(self) -> bool:
        """Whether variables of `keep_state` programs were lost since this was last asked."""
        forgot, self._forgot = self._forgot, False
        return forgot

    async def _filled(self) -> Session:
        """A new session with all the files it begins with; one that cannot have them is closed."""
        session = await self._sandbox.open()
        try:
            for file in await asyncio.to_thread(self._files.read) if self._files is not None else ():
                for start in range(0, max(len(file.data), 1), PIECE):
                    piece = replace(file, data=file.data[start : start + PIECE], start=start)
                    result = await session.run(piece)
                    if not result.ok:
                        raise InfrastructureError(f"agent.sandbox.files: {file.path}: {result.problem}")
        except BaseException:
            await session.close()
            raise
        return session

    async def export(self, folder: Path) -> dict[str, str]:
        """Copy the regular files to `folder`, which must be new or empty; what was left out, and why, by its path.

        Left out are links, files whose names a host should not have or does not take, what is over MOST_KEPT bytes in
        all, and what cannot be read.
        """
        files, left_out = await self._listed()
        return left_out | await self._copied_all(files, folder)

    async def _copied_all(self, files: Sequence[File], folder: Path) -> dict[str, str]:
        """What of it was not copied, and why."""
        left_out: dict[str, str] = {}
        room = MOST_KEPT
        for file in files:
            target = _below(folder, file)
            if target is None:
                left_out[file.path] = "no regular file" if file.kind != "file" else "a name that a host should not have"
            elif file.size > room:
                left_out[file.path] = f"{file.size} bytes, more than is left of {MOST_KEPT}"
            elif problem := await self._copied(file, target):
                left_out[file.path] = problem
            else:
                room -= file.size
        return left_out

    async def _listed(self) -> tuple[list[File], dict[str, str]]:
        """All files and links; and why it is not all of them, if it is not."""
        files: list[File] = []
        if self._session is None:
            return files, {}
        while (listed := await self._session.run(ListFiles(skip=len(files)))).ok:
            files += listed.files
            if not (listed.files and listed.more_files):
                break
        more = "some folders are too deep, or cannot be read" if listed.more_files else listed.problem
        return files, {".": more} if more else {}

    async def _copied(self, file: File, target: Path) -> str:
        """Copy a file piece by piece; what is wrong with it, and then nothing of it is there."""
        assert self._session is not None, "listed before"
        try:
            copy = await asyncio.to_thread(_new, target)
        except OSError as error:
            if error.errno not in _UNFIT:
                raise
            return _UNFIT[error.errno]
        with copy:
            for start in range(0, file.size, PIECE):
                piece = await self._session.run(ReadFile(file.path, min(PIECE, file.size - start), start))
                if not piece.ok:
                    await asyncio.to_thread(target.unlink)
                    return piece.problem
                await asyncio.to_thread(copy.write, piece.data)
        return ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is None:
            return
        try:
            if self._keep is not None and not self._session.lost:
                try:
                    await self._export_to_next(self._keep)
                except OSError as problem:
                    if error is None or isinstance(error, Exception):  # a cancellation stays one
                        raise InfrastructureError(f"agent.sandbox.keep: {problem}; make room there") from problem
        finally:
            await self._session.close()

    async def _export_to_next(self, keep: Path) -> None:
        files, left_out = await self._listed()
        if not (files or left_out):
            return
        folder = await asyncio.to_thread(_next, keep)
        left_out |= await self._copied_all(files, folder)
        if left_out:
            lines = "".join(f"{path}: {reason}\n" for path, reason in left_out.items())
            await asyncio.to_thread(Path(f"{folder}.left-out").write_text, lines, "utf-8")


def _new(target: Path) -> IO[bytes]:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.open("xb")


def _next(keep: Path) -> Path:
    """The next free `workspace-N`, made."""
    keep.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = keep / f"workspace-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("there is always one")


def _below(folder: Path, file: File) -> Path | None:
    """Where a file of a workspace goes; None for what is no regular file or has a name that a host should not have."""
    parts = PurePosixPath(file.path).parts
    if file.kind != "file" or not parts or any(part in ("..", "/") or "\\" in part for part in parts):
        return None
    return folder.joinpath(*parts)
