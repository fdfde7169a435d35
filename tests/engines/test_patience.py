"""When requests leave that wait for one another, in a time that only their waits move."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from midflight.engines.http import Limits, Patience, Transient


class Timeline:
    """A clock for many sleepers: once all of them wait, it is the time of the next."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._count), future))
        await future

    async def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        """What each gave or raised; they begin in this order."""
        done = asyncio.gather(*work, return_exceptions=True)
        while not done.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self._waiting:
                self.now, _, future = heapq.heappop(self._waiting)
                if not future.done():
                    future.set_result(None)
        return await done


async def left(
    limits: Limits,
    tokens: list[int],
    answer: Callable[[int, Timeline], Coroutine[Any, Any, None]],
    jitter: Callable[[], float] = lambda: 0.0,
) -> list[float]:
    """The seconds after which attempts were made, for requests of so many tokens that come all at once; `answer` is
    told of each attempt by its number from 0."""
    timeline, times = Timeline(), []
    patience = Patience(limits, clock=timeline, sleep=timeline.sleep, jitter=jitter)

    async def attempt() -> None:
        times.append(round(timeline.now - 1000.0, 6))
        await answer(len(times) - 1, timeline)

    assert set(await timeline.run(*(patience.run(attempt, count) for count in tokens))) == {None}
    return times


async def at_once(number: int, timeline: Timeline) -> None:
    pass


@pytest.mark.asyncio
async def test_each_limit_holds_beside_the_other() -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=60_000)
    expected = [0.0, 59.0, 59.001, *(60.0 + second for second in range(57))]
    assert await left(limits, [60_000] + [1] * 59, at_once) == expected


@pytest.mark.asyncio
async def test_what_waited_for_a_slot_leaves_no_faster_than_the_limit() -> None:
    async def first_takes_ten_seconds(number: int, timeline: Timeline) -> None:
        if number == 0:
            await timeline.sleep(10.0)

    limits = Limits(requests_per_minute=60, concurrency=1)
    assert await left(limits, [1] * 6, first_takes_ten_seconds) == [0.0, 10.0, 10.0, 11.0, 12.0, 13.0]


@pytest.mark.asyncio
async def test_what_waited_for_the_server_leaves_no_faster_than_the_limit() -> None:
    async def first_is_refused(number: int, timeline: Timeline) -> None:
        if number == 0:
            await timeline.sleep(0.5)
            raise Transient("busy", 30.0)

    limits = Limits(requests_per_minute=60)
    expected = [0.0, 0.0, 30.5, 30.5, *(31.5 + second for second in range(7))]
    assert await left(limits, [1] * 10, first_is_refused) == expected


@pytest.mark.asyncio
async def test_what_waited_for_the_server_leaves_spread_over_the_first_wait() -> None:
    async def first_is_refused(number: int, timeline: Timeline) -> None:
        if number == 0:
            raise Transient("busy", 30.0)

    chances = iter([0.9, *(number / 10 for number in range(8))])
    times = await left(Limits(backoff=2.0), [1] * 9, first_is_refused, lambda: next(chances))
    assert times == [0.0, 30.0, 30.2, 30.4, 30.6, 30.8, 31.0, 31.2, 31.4, 31.8]  # the last is the refused one


@pytest.mark.asyncio
async def test_a_wait_for_ones_own_pace_does_not_use_up_the_total_time() -> None:
    async def first_fails_after_a_second(number: int, timeline: Timeline) -> None:
        await timeline.sleep(1.0)
        if number == 0:
            raise Transient("busy")

    limits = Limits(requests_per_minute=6, total_seconds=5.0, retries=1)
    assert await left(limits, [1] * 4, first_fails_after_a_second) == [0.0, 9.0, 19.0, 29.0, 39.0]


@pytest.mark.asyncio
async def test_who_is_cancelled_while_it_waits_has_used_nothing_of_the_pace() -> None:
    timeline, times = Timeline(), list[float]()
    patience = Patience(Limits(requests_per_minute=6), clock=timeline, sleep=timeline.sleep)

    async def attempt() -> None:
        times.append(timeline.now - 1000.0)

    async def cancelled_after_five_seconds() -> None:
        waiting = [asyncio.create_task(patience.run(attempt)) for _ in range(20)]
        await timeline.sleep(5.0)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await patience.run(attempt)

    assert await timeline.run(cancelled_after_five_seconds()) == [None]
    assert times == [0.0, 9.0]
