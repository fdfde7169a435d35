"""The agent's end of one session: sends a request, gets the answer, kills the session.

Invariant: a session that does not answer in time, or answers what is no answer, is killed; it is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from midflight.errors import InfrastructureError
from midflight.sandbox.base import CLOSED, Limits, Outcome, Request, SandboxResult
from midflight.sandbox.bubblewrap.answers import lost, request_frame, result
from midflight.sandbox.bubblewrap.inside import frames

START_SECONDS = 60.0
"""How long the outer box, and a session, may take to start."""
GRACE_SECONDS = 5.0
"""How long the holder may be late before the session is killed from outside."""


class Channel:
    """The agent's end of one session; `box_alive` says whether the outer box around it still runs."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pidfd: int, box_alive: Callable[[], bool]
    ) -> None:
        self._reader, self._writer, self._pidfd, self._box_alive = reader, writer, pidfd, box_alive
        self.turn = asyncio.Lock()
        """Held while a request runs."""
        self.lost = False
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether a request can be sent; of a session that waits to be used, whether it is there still."""
        if self.lost or not self._box_alive():
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    async def begin(self) -> None:
        """Wait until the session is made.

        Raises:
            InfrastructureError: it cannot be made.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                problem = (await self._answer()).get("broken", "")
        except (asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            problem = type(error).__name__
        except BaseException:
            await self.close()
            raise
        if problem:
            await self.close()
            raise InfrastructureError(f"a bubblewrap session does not start: {problem}")

    async def _answer(self) -> dict[str, Any]:
        head = await self._reader.readexactly(frames.HEAD)
        return frames.unpack(await self._reader.readexactly(frames.length(head)))

    async def run(self, request: Request, limits: Limits) -> SandboxResult:
        """See `Session.run`; one request at a time."""
        if self._closed:
            raise InfrastructureError(CLOSED)
        if self.lost:
            return lost("the session of this trajectory ended; its files are gone")
        try:
            frame = frames.pack({**request_frame(request), "limits": asdict(limits)})
        except ValueError as error:
            return SandboxResult(Outcome.ERROR, problem=f"a request too large: {error}")
        try:
            async with asyncio.timeout(limits.wall_seconds + GRACE_SECONDS):
                self._writer.write(frame)
                await self._writer.drain()
                answer = await self._answer()
        except (asyncio.IncompleteReadError, OSError, ValueError, TimeoutError) as error:
            if self._closed:
                raise InfrastructureError(CLOSED) from error
            box_alive = self._box_alive()
            await self._lose()
            if not box_alive:
                raise InfrastructureError("the bubblewrap sandbox ended, and every session with it") from error
            return lost(f"the session ended in this call ({type(error).__name__}); its files are gone")
        except BaseException:
            await self._lose()
            raise
        if "broken" in answer:
            await self._lose()
            raise InfrastructureError(f"the sandbox cannot confine a process: {answer['broken']}")
        return result(request, answer, limits)

    async def close(self) -> None:
        """Kill every process of the session and wait until they are gone; a request that runs or waits then raises."""
        self._closed = True
        await self._lose()

    async def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._writer.close()
        try:
            with contextlib.suppress(TimeoutError):  # killed it is, though the kernel is slow to end it
                async with asyncio.timeout(GRACE_SECONDS):
                    await readable(self._pidfd)
        finally:
            os.close(self._pidfd)


async def readable(source: int | socket.socket) -> None:
    """Wait until there is something to read; of a pidfd, until its process is gone."""
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(source, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(source)
