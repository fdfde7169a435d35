"""Blocking calls in threads of their own: what hangs there holds up nothing but itself.

Invariant: no call runs in the event loop's default executor, whose few threads all share. The threads are daemons, so
one that never ends does not keep the process from ending; cancelling a call leaves its thread, which goes on unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from midflight.tools.base import InfrastructureError

T = TypeVar("T")


class Threads:
    """At most `most` threads of an event loop for one kind of call; further calls wait, in the order of asking.

    A thread counts until it ends, also when its call was cancelled.
    """

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most
        self._room: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, function: Callable[[], T]) -> T:
        """`function()`; raises what it raises, and InfrastructureError where no thread can be started."""
        room = self._room.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.most))
        await room.acquire()
        try:
            running = in_thread(function, self.name, room.release)
        except InfrastructureError:
            room.release()
            raise
        return await running


def in_thread(function: Callable[[], T], name: str, ended: Callable[[], None] = lambda: None) -> Awaitable[T]:
    """`function()` in a thread; `ended` is called on the event loop when the thread is done.

    Raises:
        InfrastructureError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        ended()
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = context.run(function)
        except StopIteration as stop:
            error = RuntimeError(f"StopIteration: {stop}")  # a future refuses StopIteration
        except BaseException as raised:  # also SystemExit and the panics of Rust extensions: the caller must not wait
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop was closed while the thread ran on
            loop.call_soon_threadsafe(settle, value, error)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise InfrastructureError(f"no thread can be started for {name}: {error}") from error
    return future
