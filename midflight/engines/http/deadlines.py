"""Time limits of many awaits with one timer: a timer each costs 5 us of the event loop a request, this 1.

Invariant: as `asyncio.timeout`, a limit ends only what runs inside it, and a task that its caller cancels as well stays
cancelled.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType


class Deadlines:
    """The limits of one event loop, which is the running one when this is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.limits: set[Limit] = set()
        """Those that have begun."""
        self._timer: asyncio.TimerHandle | None = None
        self.due = math.inf
        """When the timer is; uvloop's own does not say, where that is at once."""

    def within(self, seconds: float) -> Limit:
        """`with deadlines.within(seconds) as limit:` raises TimeoutError in time, with `limit.expired`."""
        return Limit(self, self._loop.time() + seconds)

    def begin(self, limit: Limit) -> None:
        """Called as a limit begins that is the only one, or ends before the timer is due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.due = self._loop.call_at(limit.end, self._expire), limit.end

    def rest(self) -> None:
        """Called as the last limit ends; while there are others the timer stays, finds nothing due and begins anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.due = None, math.inf

    def _expire(self) -> None:
        self._timer, self.due, now = None, math.inf, self._loop.time()
        for limit in [one for one in self.limits if one.end <= now]:
            self.limits.discard(limit)
            limit.expire()
        if self.limits:
            self.begin(min(self.limits, key=lambda limit: limit.end))


class Limit:
    """One limit; see `Deadlines.within`."""

    __slots__ = ("_before", "_deadlines", "_task", "end", "expired")

    def __init__(self, deadlines: Deadlines, end: float) -> None:
        self._deadlines, self.end, self.expired = deadlines, end, False

    def __enter__(self) -> Limit:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._deadlines.limits.add(self)
        if self.end < self._deadlines.due:
            self._deadlines.begin(self)
        return self

    def expire(self) -> None:
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        limits = self._deadlines.limits
        limits.discard(self)
        if not limits:
            self._deadlines.rest()
        if self.expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error
