"""One process of the host within limits.

Invariant: when `run_bounded` is over, its process group is dead, and no descriptor of it is open here; what left the
group is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from midflight.sandbox.base import Limits

LOOK_SECONDS = 0.1
DRAIN_SECONDS = 0.5
"""How long a process that left the group may keep the output of one that has ended."""
GRACE_SECONDS = 5.0
"""How long the agent may be late before a program that is over its time ends itself."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: `cause` is exit, wall, output or disk; `status` is below 0 for a signal."""

    cause: str
    status: int | None
    out: bytes
    err: bytes
    seconds: float


async def run_bounded(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    stdin: bytes,
    limits: Limits,
    over: Callable[[int], bool] = lambda process: False,
) -> Ended:
    """Run a command within limits of time and output, and while it is not `over`, in a process group of its own.

    Args:
        over: asked with the number of the process, until it has ended and once then.

    Raises:
        OSError: it cannot be started.
    """
    began = time.monotonic()
    loop, pipe = asyncio.get_running_loop(), subprocess.PIPE
    transport, streams = await loop.subprocess_exec(
        lambda: _Streams(limits.output_bytes),
        *command,
        cwd=folder,
        env=dict(environment),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    )
    feed = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
    feed.write(stdin)
    feed.write_eof()
    cause = ""
    try:
        while not cause:
            left = began + limits.wall_seconds - time.monotonic()
            await asyncio.wait([streams.ended], timeout=max(0.0, min(left, LOOK_SECONDS)))
            if streams.over:
                cause = "output"
            elif streams.ended.done():
                cause = "disk" if over(transport.get_pid()) else "exit"
            elif time.monotonic() - began >= limits.wall_seconds:
                cause = "wall"
            elif over(transport.get_pid()):
                cause = "disk"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        try:
            await streams.ended
            await asyncio.wait([streams.closed], timeout=DRAIN_SECONDS)
        finally:
            if 0 not in streams.lost:
                feed.abort()
            transport.close()
    cause = "output" if streams.over else cause
    out, err = (bytes(data[: limits.output_bytes]) for data in streams.outputs.values())
    status = transport.get_returncode()
    return Ended(cause, status if cause == "exit" else None, out, err, time.monotonic() - began)


class _Streams(asyncio.SubprocessProtocol):
    """What a process writes, at most one byte more than `most` of each stream; the rest is forgotten.

    `ended`: the process is; `closed`: its pipes are, too; `lost`: those of them that are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.outputs = {1: bytearray(), 2: bytearray()}
        self.lost: set[int] = set()
        loop = asyncio.get_running_loop()
        self.ended, self.closed = loop.create_future(), loop.create_future()

    @property
    def over(self) -> bool:
        return any(len(data) > self._most for data in self.outputs.values())

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.outputs[fd] += data[: self._most + 1 - len(self.outputs[fd])]

    def pipe_connection_lost(self, fd: int, error: Exception | None) -> None:
        self.lost.add(fd)

    def process_exited(self) -> None:
        self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)
