"""The session of a sandbox whose workspace is a folder of the host.

Invariant: files are touched while no program runs, and no link is followed; the folder is gone with the session.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midflight.errors import InfrastructureError
from midflight.paths import OwnFolder, remove_tree
from midflight.sandbox.base import (
    CLOSED,
    Limits,
    ListFiles,
    Outcome,
    Python,
    ReadFile,
    Request,
    SandboxResult,
    WriteFile,
)
from midflight.sandbox.bubblewrap.answers import PROGRAM_REPLY, encoded, lost, request_frame, result
from midflight.sandbox.bubblewrap.inside import files, frames, running
from midflight.sandbox.folder.process import Ended, run_bounded

FOLDERS = "midflight-"
"""How the names of sessions' folders begin."""
_HERE = Path(__file__).resolve().parent


class FolderSession(ABC):
    """See `Session`; Python programs and files.

    Args:
        limits: of a request that brings none.
        name: of the sandbox, for messages.
        slots: one is taken while a request runs; None for no bound.

    Raises:
        InfrastructureError: its folder cannot be made.
    """

    def __init__(self, limits: Limits, name: str, slots: asyncio.Semaphore | None = None) -> None:
        self._limits, self._name = limits, name
        self._turn, self._slots = asyncio.Lock(), slots
        self._under_way: asyncio.Task[SandboxResult] | None = None
        self.lost = False
        try:
            self._own = OwnFolder.make(FOLDERS)
            self._root = self._own.path
            self._program, self._workspace, self._reply = map(self._root.joinpath, ("program", "workspace", "reply"))
            for folder in (self._program, self._workspace, self._reply):
                folder.mkdir()
            for file in (_HERE / "main.py", _HERE / "watch.py", running.__file__):
                shutil.copy(file, self._program)
        except OSError as error:
            raise InfrastructureError(f"no session of the sandbox {name}: {error}") from error

    @abstractmethod
    def _command(self, limits: Limits) -> Sequence[str]:
        """What runs program/main.py."""

    def _environment(self) -> dict[str, str]:
        """What its processes begin with."""
        return {}

    def _over(self, process: int | None = None) -> bool:
        """Whether it has more files, or larger ones, than it may; `process` runs in it, or just ended."""
        return False

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`."""
        limits = limits or self._limits
        if self.lost:
            return lost("the session was closed; its files are gone")
        async with self._turn, self._slots or contextlib.nullcontext():
            if self.lost:
                raise InfrastructureError(CLOSED)
            try:
                match request:
                    case Python(keep_state=False):
                        return await self._ended(asyncio.ensure_future(self._python(request, limits)))
                    case WriteFile() | ReadFile() | ListFiles():
                        return self._touched(request, limits)
            except OSError as error:
                what = "run a program" if isinstance(request, Python) else "touch a file"
                raise InfrastructureError(f"the sandbox {self._name} cannot {what}: {error}") from error
        problem = f"the sandbox {self._name} runs programs of their own alone: no commands, tests or state"
        return SandboxResult(Outcome.ERROR, problem=problem)

    async def _python(self, request: Python, limits: Limits) -> SandboxResult:
        """Run a program in the workspace."""
        (self._program / "code.py").write_bytes(base64.b64encode(encoded(request.code)))
        remove_tree(self._reply)
        self._reply.mkdir()
        ended = await self._process(encoded(request.stdin), limits)
        return _answered(request, limits, ended, _bounded(self._reply / "reply"))

    async def _process(self, stdin: bytes, limits: Limits) -> Ended:
        """Run what is in the folder program."""
        return await run_bounded(self._command(limits), self._environment(), self._root, stdin, limits, self._over)

    async def _ended(self, program: asyncio.Task[SandboxResult]) -> SandboxResult:
        self._under_way = program
        try:
            return await program
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.lost and task is not None and not task.cancelling():  # `close` cancelled it, not the caller
                raise InfrastructureError(CLOSED) from None
            raise

    async def close(self) -> None:
        """See `Session.close`."""
        self.lost = True
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait([self._under_way])
        await asyncio.to_thread(self._own.remove)

    def _touched(self, request: WriteFile | ReadFile | ListFiles, limits: Limits) -> SandboxResult:
        if isinstance(request, WriteFile) and request.start + len(request.data) > limits.file_bytes:
            return SandboxResult(Outcome.FILE_LIMIT, problem=f"{request.path}: more than {limits.file_bytes} bytes")
        if isinstance(request, WriteFile) and self._over():
            return SandboxResult(Outcome.FILE_LIMIT, problem=f"{request.path}: no room for more files")
        reply = files.answer(request_frame(request), str(self._workspace))
        return _answered(request, limits, Ended("exit", 0, b"", b"", 0.0), frames.pack(reply))


def _answered(request: Request, limits: Limits, ended: Ended, reply: bytes) -> SandboxResult:
    """The result of a process, and of the frame that it left."""
    answer: dict[str, Any] = {"cause": ended.cause, "status": ended.status, "seconds": ended.seconds}
    answer |= {"out": frames.to_text(ended.out), "err": frames.to_text(ended.err), "reply": frames.to_text(reply)}
    return result(request, {**answer, "state_kept": False}, limits)


def _bounded(file: Path) -> bytes:
    """What a program left for an answer; nothing where it is no small regular file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, PROGRAM_REPLY) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
