"""How much is asked of a server at once, how fast, and how often again when it fails.

Invariant: this is the only place that asks a server again. What it gives up on is `EngineGaveUp`, which no caller
retries; a request is tried again only where the same request may succeed, and never before the time the server named.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from midflight.engines.base import EngineGaveUp
from midflight.engines.http.deadlines import Deadlines

T = TypeVar("T")


class Transient(Exception):
    """This attempt failed; the same request may succeed later, after `retry_after` seconds at the earliest."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Limits:
    """What one engine may ask of its server.

    Args:
        concurrency: requests under way at a time.
        requests_per_minute: as the name says; None: as many as come.
        tokens_per_minute: prompt and answer, by estimate; None: as many as come.
        retries: further attempts after the first.
        attempt_seconds: time limit of one attempt.
        total_seconds: time limit of a request: all attempts, the waits between them and those that the server asked
            for; waiting for a slot or for one's own pace, which is no fault of the server, does not use it up.
        backoff: the first wait is up to so many seconds, and at least half; it doubles with each. Over so many seconds
            those are spread, too, that wait for a time that the server named.
        most_backoff: no wait is longer, but for one that the server names.
    """

    concurrency: int = 64
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    retries: int = 4
    attempt_seconds: float = 120.0
    total_seconds: float = 300.0
    backoff: float = 0.5
    most_backoff: float = 30.0


class Patience:
    """Runs attempts within `Limits`. One for all modules that share an engine."""

    def __init__(
        self,
        limits: Limits,
        *,
        name: str = "engine",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits
        self._name, self._clock, self._sleep, self._jitter = name, clock, sleep, jitter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = _Slots(limits.concurrency)
        self._paces = [_Pace(limits.requests_per_minute), _Pace(limits.tokens_per_minute)]
        self._limited = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        self._closed_until = 0.0

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        tokens: int = 0,
        before: Callable[[int], None] | None = None,
        waited: float = 0.0,
    ) -> T:
        """What `attempt` gives. It raises Transient for what may be tried again; anything else passes.

        `tokens` is the request's size, prompt and answer, for the limit of tokens; `before` is called with the number
        of each attempt, from 1, when its turn has come, and may raise; `waited` are the seconds for which the request
        has been under way already.

        Raises:
            EngineGaveUp: the last attempt failed, or there is no time for another.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._slots = loop, _Slots(self.limits.concurrency)
            self._deadlines, self._pacing = Deadlines(), asyncio.Lock()
        end, count = self._clock() - waited + self.limits.total_seconds, 0
        while True:
            count += 1
            if not self._slots.taken():
                wanted = self._clock()
                await self._slots.wait()
                end += self._clock() - wanted
            try:
                if self._limited or self._closed_until > 0:
                    end = await self._turn(tokens, end)
                if before is not None:
                    before(count)
                left = end - self._clock()
                limit = self._deadlines.within(min(self.limits.attempt_seconds, left))
                try:
                    with limit:
                        return await attempt()
                except TimeoutError:
                    if not limit.expired:
                        raise
                    raise Transient(f"no answer {self._late(left)}") from None
            except Transient as error:
                problem = error
            finally:
                self._slots.release()
            wait = self._wait(count, problem.retry_after)
            failed, spent = f"{self._name}: {problem}", self.limits.total_seconds - (end - self._clock())
            if count > self.limits.retries:
                raise EngineGaveUp(f"{failed} ({count} attempts in {spent:.1f} s; retries = {self.limits.retries})")
            if spent + wait >= self.limits.total_seconds:
                late = f"another would come after total_seconds = {self.limits.total_seconds:g}"
                enough = _enough(spent + wait) if problem.retry_after > 0 else ""
                raise EngineGaveUp(f"{failed} ({count} attempts; {late}{enough})")
            await self._sleep(wait)

    def _wait(self, count: int, retry_after: float) -> float:
        """Seconds until the next attempt; what the server asks for holds for every request of the engine."""
        chance = self._jitter()
        if retry_after > 0:
            self._closed_until = max(self._closed_until, self._clock() + retry_after)
            retry_after += self.limits.backoff * chance
        longest: float = min(self.limits.backoff * 2.0 ** (count - 1), self.limits.most_backoff)
        return max(retry_after, longest * (0.5 + 0.5 * chance))

    async def _turn(self, tokens: int, end: float) -> float:
        """Wait, in a slot, for a time when something may be asked; `end`, later by what the paces made it wait.

        Raises:
            EngineGaveUp: the server's own time is after `end`.
        """
        while True:
            moment = self._clock()
            if self._closed_until > moment:
                wait = self._closed_until + self.limits.backoff * self._jitter() - moment
                moment += wait
                if moment >= end:
                    raise EngineGaveUp(
                        f"{self._name}: its turn, by the server's Retry-After, would come after total_seconds = "
                        f"{self.limits.total_seconds:g}{_enough(moment - end + self.limits.total_seconds)}"
                    )
                await self._sleep(wait)
            if self._limited:
                wanted = self._clock()
                moment = await self._paced(tokens, moment)
                end += self._clock() - wanted
            if self._closed_until <= moment:
                return end

    async def _paced(self, tokens: int, moment: float) -> float:
        """Wait, behind who came before, for a time from `moment` on when the paces let a request leave; that time.

        Nothing is kept for those behind the first: who goes away has used nothing, and nor has who finds that the
        server asked for a wait meanwhile.
        """
        async with self._pacing:
            now = self._clock()
            moment = max(moment, now, *(pace.next for pace in self._paces))
            if moment > now:
                await self._sleep(moment - now)
            if self._closed_until <= moment:
                for pace, amount in zip(self._paces, (1, tokens), strict=True):
                    pace.take(moment, amount)
            return moment

    def _late(self, left: float) -> str:
        """By when an attempt that began with so many seconds left of the total has no answer."""
        if self.limits.attempt_seconds < left:
            return f"within {self.limits.attempt_seconds:g} s"
        return f"by total_seconds = {self.limits.total_seconds:g}"


def _enough(seconds: float) -> str:
    """What to set where the server names a time that is too late."""
    return f"; set total_seconds above {math.ceil(seconds)}, and agent.max_seconds above that"


class _Slots:
    """As `asyncio.Semaphore`, but that a free slot is taken without a coroutine."""

    def __init__(self, count: int) -> None:
        self._free, self._waiting, self._given = count, 0, asyncio.Semaphore(0)

    def taken(self) -> bool:
        """Take a slot if one is free."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def wait(self) -> None:
        """Take the next slot that is given back; who came first has it first."""
        self._waiting += 1
        try:
            await self._given.acquire()
        finally:
            self._waiting -= 1

    def release(self) -> None:
        if self._waiting > 0:
            self._given.release()
        else:
            self._free += 1


class _Pace:
    """Amounts a minute, evenly, after a burst of at most a second's worth."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds_each = 0.0 if per_minute is None else 60.0 / per_minute
        self.next = 0.0
        """When more may be used."""

    def take(self, moment: float, amount: float) -> None:
        """Use `amount` then."""
        self.next = max(self.next, moment - 1.0) + amount * self._seconds_each
