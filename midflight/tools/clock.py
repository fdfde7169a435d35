"""The time of a call, which stands still while the call waits for its turn at what calls share, such as a worker.

Invariant: a call that others keep waiting has no less time to run than one that is alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self


class TimeLimit:
    """As `asyncio.timeout`, of a call; None never ends it, but tells how long it waited."""

    def __init__(self, seconds: float | None) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._end: float | None = None
        self._waiting, self._since, self._waited = 0, 0.0, 0.0
        self._over = False

    @property
    def waited(self) -> float:
        """Seconds that the call has waited for its turns."""
        return self._waited

    def expired(self) -> bool:
        """Whether the limit has ended the call."""
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self._token = _CURRENT.set((*_CURRENT.get(), self))
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        self._over = True
        await self._timeout.__aexit__(kind, error, trace)

    def stop(self) -> None:
        """Stand still; where several tasks of a call wait, until the last goes on."""
        self._waiting += 1
        if self._waiting == 1:
            self._since, self._end = self.loop.time(), self._timeout.when()
            self._reschedule(None)

    def go_on(self) -> None:
        """End one `stop`."""
        self._waiting -= 1
        if self._waiting == 0:
            waited = self.loop.time() - self._since
            self._waited += waited
            self._reschedule(None if self._end is None else self._end + waited)

    def _reschedule(self, end: float | None) -> None:
        if not self._over and not self.expired():  # a task may outlive the call that it is of
            self._timeout.reschedule(end)


_CURRENT: ContextVar[tuple[TimeLimit, ...]] = ContextVar("time limits", default=())


@contextmanager
def waiting() -> Iterator[None]:
    """Wait in here for a turn: the time of all calls around this one stands still.

    But for those of another event loop, of which this one runs in a thread: they do not know what goes on in it.
    """
    loop = asyncio.get_running_loop()
    limits = [limit for limit in _CURRENT.get() if limit.loop is loop]
    for limit in limits:
        limit.stop()
    try:
        yield
    finally:
        for limit in limits:
            limit.go_on()
