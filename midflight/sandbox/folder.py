"""What sandboxes have in common whose workspace is a folder of the host and whose programs are processes of the host.

Invariant: files are touched while no program runs, and no link is followed; a process group that is over a limit is
killed; the folder is gone with the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midflight.errors import InfrastructureError
from midflight.paths import OwnFolder
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
from midflight.sandbox.bubblewrap.answers import lost, request_frame, result
from midflight.sandbox.bubblewrap.inside import files, frames

LOOK_SECONDS = 0.1
FOLDERS = "midflight-"
"""How the names of sessions' folders begin."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: `cause` is exit, wall, output or disk; `status` is below 0 for a signal."""

    cause: str
    status: int | None
    out: bytes
    err: bytes
    seconds: float


class FolderSession(ABC):
    """See `Session`; Python programs and files."""

    def __init__(self, limits: Limits, name: str) -> None:
        self._limits, self._name = limits, name
        self._turn = asyncio.Lock()
        self._own = OwnFolder.make(FOLDERS)
        self._root = self._own.path
        self._workspace = self._root / "workspace"
        self._workspace.mkdir()
        self._under_way: asyncio.Task[SandboxResult] | None = None
        self.lost = False

    @abstractmethod
    async def _python(self, request: Python, limits: Limits) -> SandboxResult:
        """Run a program in the workspace."""

    def _over(self) -> bool:
        """Whether it has more files, or larger ones, than it may."""
        return False

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`."""
        limits = limits or self._limits
        if self.lost:
            return lost("the session was closed; its files are gone")
        async with self._turn:
            if self.lost:
                raise InfrastructureError(CLOSED)
            match request:
                case Python(keep_state=False):
                    return await self._ended(asyncio.ensure_future(self._python(request, limits)))
                case WriteFile() | ReadFile() | ListFiles():
                    return self._touched(request, limits)
                case _:
                    problem = f"the sandbox {self._name} runs programs of their own alone: no commands, tests or state"
                    return SandboxResult(Outcome.ERROR, problem=problem)

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
        if isinstance(request, WriteFile) and len(request.data) > limits.file_bytes:
            return SandboxResult(Outcome.FILE_LIMIT, problem=f"{request.path}: more than {limits.file_bytes} bytes")
        if isinstance(request, WriteFile) and self._over():
            return SandboxResult(Outcome.FILE_LIMIT, problem=f"{request.path}: no room for more files")
        reply = files.answer(request_frame(request), str(self._workspace))
        return answered(request, limits, Ended("exit", 0, b"", b"", 0.0), frames.pack(reply))


def answered(request: Request, limits: Limits, ended: Ended, reply: bytes) -> SandboxResult:
    """The result of a process, and of the frame that it left."""
    answer: dict[str, Any] = {"cause": ended.cause, "status": ended.status, "seconds": ended.seconds}
    answer |= {"out": frames.to_text(ended.out), "err": frames.to_text(ended.err), "reply": frames.to_text(reply)}
    return result(request, {**answer, "state_kept": False}, limits)


async def run_bounded(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    stdin: bytes,
    limits: Limits,
    over: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a command within limits of time and output, and while it is not `over`, in a process group of its own."""
    began = time.monotonic()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=dict(environment), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    outputs = [bytearray(), bytearray()]
    streams = zip((process.stdout, process.stderr), outputs, strict=True)
    reading = [asyncio.ensure_future(_read(stream, data, limits.output_bytes)) for stream, data in streams]
    feeding = asyncio.ensure_future(_feed(process.stdin, stdin))
    cause = ""
    try:
        ending = asyncio.ensure_future(process.wait())
        while not cause:
            left = began + limits.wall_seconds - time.monotonic()
            await asyncio.wait([ending], timeout=max(0.0, min(left, LOOK_SECONDS)))
            if any(len(data) > limits.output_bytes for data in outputs):
                cause = "output"
            elif ending.done():
                cause = "disk" if over() else "exit"
            elif time.monotonic() - began >= limits.wall_seconds:
                cause = "wall"
            elif over():
                cause = "disk"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        feeding.cancel()
        status = await process.wait()
        await asyncio.gather(*reading)
    out, err = (bytes(data[: limits.output_bytes]) for data in outputs)
    return Ended(cause, status if cause == "exit" else None, out, err, time.monotonic() - began)


async def _read(stream: asyncio.StreamReader, data: bytearray, most: int) -> None:
    """Put into `data` what comes out, one byte more than `most` of it; the rest is read and forgotten."""
    while part := await stream.read(2**16):
        data += part[: most + 1 - len(data)]


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
        stream.close()
