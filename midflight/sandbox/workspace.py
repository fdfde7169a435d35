"""The session of one trajectory, as its tools share it: opened at the first request, gone with the trajectory.

Invariant: nothing of it is on the host's disk, unless it is kept; then regular files alone, below a new folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from midflight.errors import InfrastructureError
from midflight.sandbox.base import (
    File,
    Limits,
    ListFiles,
    ReadFile,
    Request,
    Sandbox,
    SandboxResult,
    Session,
    WriteFile,
)

MOST_KEPT = 256 * 2**20
"""Bytes of a kept workspace: a file with holes takes more on the host than it does inside."""


class StartFiles:
    """The regular files below a folder of the host, which workspaces begin with: those of the first time it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: list[tuple[str, bytes]] | None = None
        self._reading = threading.Lock()

    def read(self) -> Sequence[tuple[str, bytes]]:
        """Each with its name below the folder.

        Raises:
            InfrastructureError: one cannot be read; the next call tries again.
        """
        with self._reading:
            if self._read is None:
                paths = [path for path in sorted(self._folder.rglob("*")) if path.is_file() and not path.is_symlink()]
                self._read = [(path.relative_to(self._folder).as_posix(), _content(path)) for path in paths]
            return self._read


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InfrastructureError(f"agent.sandbox.files: {path}: {error}") from error


class Workspace:
    """Use it as an asynchronous context manager.

    Args:
        sandbox: where it is opened.
        keep: a folder of the host; at the end the files go to its next free `workspace-N`, if there are any. Where that
            fails, leaving raises InfrastructureError, and the session is closed all the same.
        files: what it begins with.
    """

    def __init__(self, sandbox: Sandbox, keep: Path | None = None, files: StartFiles | None = None) -> None:
        self._sandbox, self._keep, self._files = sandbox, keep, files
        self._session: Session | None = None
        self._opening = asyncio.Lock()

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`. A session that was lost is followed by a new one, as the first began.

        Raises:
            InfrastructureError: the sandbox cannot be had, or broke.
        """
        async with self._opening:
            if self._session is None or self._session.lost:
                self._session = await self._filled()
        return await self._session.run(request, limits)

    async def _filled(self) -> Session:
        """A new session with all the files it begins with; one that cannot have them is closed."""
        session = await self._sandbox.open()
        try:
            for name, data in await asyncio.to_thread(self._files.read) if self._files is not None else ():
                result = await session.run(WriteFile(name, data))
                if not result.ok:
                    raise InfrastructureError(f"agent.sandbox.files: {name}: {result.problem}")
        except BaseException:
            await session.close()
            raise
        return session

    async def export(self, folder: Path) -> list[Path]:
        """Copy the regular files to `folder`, which must be new or empty; what was written.

        Links, and files whose names a host should not have, are left out, and what is over MOST_KEPT bytes in all.
        """
        written, room = [], MOST_KEPT
        for file in (await self.run(ListFiles())).files:
            target = _below(folder, file)
            if target is None or file.size > room:
                continue
            result = await self.run(ReadFile(file.path, max(file.size, 1)))
            if result.ok:
                room -= len(result.data)
                await asyncio.to_thread(_write, target, result.data)
                written.append(target)
        return written

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
        if not (await self.run(ListFiles())).files:
            return
        await self.export(await asyncio.to_thread(_next, keep))


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


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
    """Where a file of a workspace goes; None for what is no regular file or has a name that leads elsewhere."""
    parts = PurePosixPath(file.path).parts
    if file.kind != "file" or not parts or any(part in ("..", "/") or "\\" in part for part in parts):
        return None
    return folder.joinpath(*parts)
