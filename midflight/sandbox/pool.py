"""Sessions made ahead, and who may run: first come, first served.

Invariant: a session is handed out once and never taken back. The pool lives on an event loop in a thread of its own, so
one sandbox serves every loop of the process, and outlasts them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from midflight.errors import InfrastructureError

S = TypeVar("S")
T = TypeVar("T")


class WarmPool(Generic[S]):
    """Keeps `size` of what `make` gives ready. Use it from one event loop."""

    def __init__(self, make: Callable[[], Awaitable[S]], size: int) -> None:
        self._make, self._size = make, size
        self._ready: deque[S] = deque()
        self._making: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> int:
        """How many are."""
        return len(self._ready)

    async def take(self) -> S:
        """One that is ready, or a new one; `fill` makes its replacement, when there is time.

        Raises:
            InfrastructureError: it cannot be made.
        """
        return self._ready.popleft() if self._ready else await self._make()

    def fill(self) -> None:
        """Start to make what is lacking. One that fails is made again by who needs it, who is then told why."""
        for _ in range(self._size - len(self._ready) - len(self._making)):
            task = asyncio.get_running_loop().create_task(self._add())
            self._making.add(task)
            task.add_done_callback(self._making.discard)

    async def _add(self) -> None:
        try:
            self._ready.append(await self._make())
        except InfrastructureError:
            return

    async def settle(self) -> None:
        """Wait for what is being made."""
        await asyncio.gather(*self._making)

    async def empty(self) -> list[S]:
        """Stop making, for good; what was ready."""
        self._size = 0
        making = list(self._making)
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        ready = list(self._ready)
        self._ready.clear()
        return ready


class Shared(Generic[S]):
    """A thing that is made once and used by all. Who waits for it may be cancelled: the making goes on for the next.

    Use it from one event loop. A making that failed is tried again by who asks next.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, S]]) -> None:
        self._make = make
        self._attempt: asyncio.Task[S] | None = None

    async def get(self) -> S:
        """The thing, or what its making raises."""
        attempt = self._attempt
        if attempt is None or (attempt.done() and (attempt.cancelled() or attempt.exception() is not None)):
            attempt = self._attempt = asyncio.get_running_loop().create_task(self._make())
        return await asyncio.shield(attempt)

    @property
    def made(self) -> S | None:
        """The thing in use, if there is one."""
        attempt = self._attempt
        if attempt is None or not attempt.done() or attempt.cancelled() or attempt.exception() is not None:
            return None
        return attempt.result()

    def drop(self, thing: S) -> bool:
        """Have the next who asks make another; whether `thing` was still the one in use."""
        if self.made is not thing:
            return False
        self._attempt = None
        return True

    async def take(self) -> S | None:
        """The thing if there is one, to be ended by the caller; a making that is under way is cancelled."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        if not attempt.done():
            attempt.cancel()
        (made,) = await asyncio.gather(attempt, return_exceptions=True)
        return None if isinstance(made, BaseException) else made


class LoopThread:
    """An event loop in a daemon thread; coroutines are run on it from any other."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What `coroutine` gives; cancelling this cancels it.

        Raises:
            InfrastructureError: the thread was stopped.
        """
        if self.loop.is_closed():
            coroutine.close()
            raise InfrastructureError("the sandbox was closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the thread's stop cancelled it, not the caller
                raise InfrastructureError("the sandbox was closed") from None
            raise

    def wait(self, coroutine: Coroutine[Any, Any, T], seconds: float | None) -> T:
        """The same, from a thread that may block."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def stop(self) -> None:
        """End the loop and its thread; what still runs on it is cancelled."""
        self.wait(_cancel_others(), None)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
