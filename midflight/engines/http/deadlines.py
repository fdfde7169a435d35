"""Time limits of many awaits with one timer: a timer each costs 5 us of the event loop a request, this 1.

Invariant: as `asyncio.timeout`, a limit ends only what runs inside it, and a task that its caller cancels as well stays
cancelled.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadlines:
    """The limits of one event loop, which is the running one when this is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0  # of the timer; uvloop's own does not say, where it is due at once

    def within(self, seconds: float) -> Limit:
        """`with deadlines.within(seconds) as limit:` raises TimeoutError in time, with `limit.expired`."""
        return Limit(self, self._loop.time() + seconds)

    def add(self, limit: Limit) -> None:
        self._limits.add(limit)
        if self._timer is None or limit.end < self._when:
            self._set(limit.end)

    def remove(self, limit: Limit) -> None:
        """The timer stays: it finds nothing due, and looks for the next."""
        self._limits.discard(limit)
        if not self._limits and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, end: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._when = self._loop.call_at(end, self._due), end

    def _due(self) -> None:
        self._timer, now = None, self._loop.time()
        for limit in [one for one in self._limits if one.end <= now]:
            self._limits.discard(limit)
            limit.expire()
        if self._limits:
            self._set(min(limit.end for limit in self._limits))


class Limit:
    """One limit; see `Deadlines.within`."""

    __slots__ = ("_before", "_deadlines", "_task", "end", "expired")

    def __init__(self, deadlines: Deadlines, end: float) -> None:
        self._deadlines, self.end, self.expired = deadlines, end, False

    def __enter__(self) -> Limit:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._deadlines.add(self)
        return self

    def expire(self) -> None:
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        if self.expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error
