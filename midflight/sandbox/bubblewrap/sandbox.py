"""`BubblewrapSandbox`: the zygote, the warm sessions and the order of service, behind the `Sandbox` protocol."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from types import TracebackType
from typing import Self

from midflight.errors import InfrastructureError
from midflight.sandbox.base import Limits, ListFiles, Outcome, ReadFile, Request, SandboxResult, WriteFile
from midflight.sandbox.bubblewrap.answers import lost as gone
from midflight.sandbox.bubblewrap.channel import Channel
from midflight.sandbox.bubblewrap.interpreter import installed
from midflight.sandbox.bubblewrap.zygote import Box, Zygote
from midflight.sandbox.pool import LoopThread, Shared, WarmPool

CLOSE_SECONDS = 30.0
MADE_AT_ONCE = 8
"""Sessions that the zygote is asked for at a time; more would fill its socket."""


class BubblewrapSandbox:
    """See `Sandbox`.

    Args:
        limits: of a request that brings none.
        box: packages, and the size of a workspace.
        warm: sessions kept ready.
        running: requests that run at a time, first come first served; None for the number of cores. Sessions may be
            more: one that waits for its trajectory takes no processor time. Reading and writing a file waits for no
            program, only for as many others of its kind.
    """

    name = "bubblewrap"
    full = True

    def __init__(
        self, limits: Limits | None = None, box: Box | None = None, *, warm: int = 4, running: int | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.box = box or Box()
        self._warm, self._running = warm, running or len(os.sched_getaffinity(0))
        self._starting = threading.Lock()
        self._core: _Core | None = None

    @functools.cached_property
    def packages(self) -> tuple[str, ...]:
        """See `Sandbox.packages`: those of the box that are installed."""
        return installed(self.box.packages)

    async def open(self) -> BubblewrapSession:
        """See `Sandbox.open`."""
        core = self._started()
        return BubblewrapSession(core, await core.thread.run(core.open()), self.limits)

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Sandbox.run`."""
        core = self._started()
        return await core.thread.run(core.run_once(request, limits or self.limits))

    def run_blocking(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """`run`, for callers without an event loop."""
        core = self._started()
        return core.thread.wait(core.run_once(request, limits or self.limits), None)

    async def ready(self) -> None:
        """Wait until the zygote runs and every warm session is made; no need to call it, but to measure."""
        core = self._started()
        await core.thread.run(core.ready())

    def close(self) -> None:
        """See `Sandbox.close`."""
        with self._starting:
            core, self._core = self._core, None
        if core is not None:
            try:
                core.thread.wait(core.close(), CLOSE_SECONDS)
            finally:
                core.thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> _Core:
        with self._starting:
            if self._core is None:
                try:
                    self._core = _Core(self.box, self._warm, self._running)
                except OSError as error:
                    raise InfrastructureError(f"the bubblewrap sandbox does not start: {error}") from error
            return self._core


class BubblewrapSession:
    """See `Session`."""

    def __init__(self, core: _Core, channel: Channel, limits: Limits) -> None:
        self._core, self._channel, self._limits = core, channel, limits

    @property
    def lost(self) -> bool:
        return self._channel.lost

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`."""
        if self.lost:
            return gone("the session of this trajectory ended; its files are gone")
        return await self._core.thread.run(self._core.run(self._channel, request, limits or self._limits))

    async def close(self) -> None:
        """See `Session.close`."""
        if not self._core.forgot(self._channel):
            await self._core.thread.run(self._core.end(self._channel))


class _Core:
    """What happens on the sandbox's own loop, from its start to its close."""

    def __init__(self, box: Box, warm: int, running: int) -> None:
        self.thread = LoopThread("midflight-sandbox")
        self._turns, self._file_turns = asyncio.Semaphore(running), asyncio.Semaphore(running)
        self._asking = asyncio.Semaphore(MADE_AT_ONCE)
        self._pool = WarmPool(self._make, warm)
        self._open: set[Channel] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._zygote = Shared(lambda: Zygote.start(box))
        self._closed = False

    async def open(self) -> Channel:
        channel = await self._taken()
        self._pool.fill()
        return channel

    async def _taken(self) -> Channel:
        """A session that is there: what waited in the pool may have ended with the outer box."""
        while True:
            fresh = not self._pool.ready
            channel = await self._pool.take()
            self._open.add(channel)
            if fresh or channel.usable:
                return channel
            await self.end(channel)

    def _slots(self, request: Request) -> asyncio.Semaphore:
        """Where a request waits for its turn."""
        return self._file_turns if isinstance(request, WriteFile | ReadFile | ListFiles) else self._turns

    async def run(self, channel: Channel, request: Request, limits: Limits) -> SandboxResult:
        async with channel.turn, self._slots(request):
            return await self._ran(channel, request, limits)

    async def run_once(self, request: Request, limits: Limits) -> SandboxResult:
        async with self._slots(request):
            self._check()
            channel = await self._taken()
            try:
                return await self._ran(channel, request, limits)
            finally:  # behind the answer: who waits for it does not wait for this
                task = asyncio.get_running_loop().create_task(self._end_and_fill(channel))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _ran(self, channel: Channel, request: Request, limits: Limits) -> SandboxResult:
        """What came of it; no program is to blame for what our own closing ended."""
        self._check()
        result = await channel.run(request, limits)
        if result.outcome is Outcome.KILLED:
            self._check()
        return result

    def _check(self) -> None:
        if self._closed:
            raise InfrastructureError("the sandbox was closed")

    def forgot(self, channel: Channel) -> bool:
        """Whether nothing of it is kept, so that no loop is needed to end it; one that was lost is dropped."""
        if channel.lost:
            self._open.discard(channel)
        return channel not in self._open

    async def end(self, channel: Channel) -> None:
        self._open.discard(channel)
        await channel.close()

    async def _end_and_fill(self, channel: Channel) -> None:
        await self.end(channel)
        self._pool.fill()

    async def ready(self) -> None:
        self._pool.fill()
        await self._pool.settle()

    async def close(self) -> None:
        self._closed = True
        for channel in (*await self._pool.empty(), *self._open):
            await self.end(channel)
        await asyncio.gather(*self._closing)
        zygote = await self._zygote.take()
        if zygote is not None:
            await zygote.close()

    async def _make(self) -> Channel:
        """A session; where the outer box ended before it was there, of another box, once."""
        await self._box_alive()
        try:
            return await self._asked()
        except InfrastructureError:
            if await self._box_alive():
                raise
        return await self._asked()

    async def _asked(self) -> Channel:
        zygote = await self._zygote.get()
        async with self._asking:
            return await zygote.open()

    async def _box_alive(self) -> bool:
        """Whether the outer box runs, or cannot be had at all; one that ended is dropped."""
        zygote = self._zygote.made
        if zygote is None or zygote.alive:
            return True
        if self._zygote.drop(zygote):
            await zygote.close()
        return False
