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
        total_seconds: time limit of a request from when it is made: waiting for its turn, all attempts, the waits
            between them.
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
        self._slots = asyncio.Semaphore(limits.concurrency)
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
            self._loop, self._slots = loop, asyncio.Semaphore(self.limits.concurrency)
            self._deadlines = Deadlines()
        began, count, wait = self._clock() - waited, 0, 0.0
        end = began + self.limits.total_seconds
        await self._turn(tokens, end)
        while True:
            count += 1
            try:
                if before is not None:
                    before(count)
                return await self._attempt(attempt, end - self._clock())
            except Transient as error:
                wait = self._wait(count, error.retry_after)
                failed = f"{self._name}: {error}"
                spent = self._clock() - began
                named = error.retry_after > 0
            finally:
                self._slots.release()
            if count > self.limits.retries:
                raise EngineGaveUp(f"{failed} ({count} attempts in {spent:.1f} s)")
            if spent + wait >= self.limits.total_seconds:
                late = f"another would come after total_seconds = {self.limits.total_seconds:g}"
                raise EngineGaveUp(f"{failed} ({count} attempts; {late}{_enough(spent + wait) if named else ''})")
            await self._sleep(wait)
            await self._turn(tokens, end)

    async def _attempt(self, attempt: Callable[[], Awaitable[T]], left: float) -> T:
        seconds = min(self.limits.attempt_seconds, left)
        limit = self._deadlines.within(seconds)
        try:
            with limit:
                return await attempt()
        except TimeoutError:
            if not limit.expired:
                raise
            said = f"within {seconds:g} s" if seconds < left else f"by total_seconds = {self.limits.total_seconds:g}"
            raise Transient(f"no answer {said}") from None

    def _wait(self, count: int, retry_after: float) -> float:
        """Seconds until the next attempt; what the server asks for holds for every request of the engine."""
        chance = self._jitter()
        if retry_after > 0:
            self._closed_until = max(self._closed_until, self._clock() + retry_after)
            retry_after += self.limits.backoff * chance
        longest: float = min(self.limits.backoff * 2.0 ** (count - 1), self.limits.most_backoff)
        return max(retry_after, longest * (0.5 + 0.5 * chance))

    async def _turn(self, tokens: int, end: float) -> None:
        """A slot, at a time when something may be asked; whoever waits for that time holds a slot already.

        Raises:
            EngineGaveUp: that is after `end`.
        """
        await self._slot(end)
        try:
            while True:
                now = self._clock()
                moment = self._place(now, tokens, end)
                if moment > now:
                    await self._sleep(moment - now)
                if self._closed_until <= moment:
                    return
        except BaseException:
            self._slots.release()
            raise

    async def _slot(self, end: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(end - self._clock()):
                await self._slots.acquire()
        except TimeoutError:
            raise self._too_late(f"concurrency = {self.limits.concurrency}") from None

    def _place(self, now: float, tokens: int, end: float) -> float:
        """When a request may leave; the paces then keep that time for it. One that comes too late takes nobody's."""
        moment = now
        if self._closed_until > moment:
            moment = self._closed_until + self.limits.backoff * self._jitter()
            if moment >= end:
                late = self._too_late("the server's Retry-After")
                raise EngineGaveUp(f"{late}{_enough(moment - end + self.limits.total_seconds)}")
        if self._limited:
            paced = max(pace.next for pace in self._paces)
            if paced > moment:
                moment = paced
                if moment >= end:
                    raise self._too_late("requests_per_minute and tokens_per_minute")
            for pace, amount in zip(self._paces, (1, tokens), strict=True):
                pace.take(moment, amount)
        return moment

    def _too_late(self, what: str) -> EngineGaveUp:
        return EngineGaveUp(
            f"{self._name}: its turn, by {what}, would come after total_seconds = {self.limits.total_seconds:g}"
        )


def _enough(seconds: float) -> str:
    """What to set where the server names a time that is too late."""
    return f"; set total_seconds above {math.ceil(seconds)}, and agent.max_seconds above that"


class _Pace:
    """Amounts a minute, evenly, after a burst of at most a second's worth."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds_each = 0.0 if per_minute is None else 60.0 / per_minute
        self.next = 0.0
        """When more may be used."""

    def take(self, moment: float, amount: float) -> None:
        """Use `amount` then."""
        self.next = max(self.next, moment - 1.0) + amount * self._seconds_each
