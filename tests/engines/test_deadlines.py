"""Limits that share a timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from midflight import looping
from midflight.engines.http.deadlines import Deadlines
from tests.engines.serving import LOOPS


async def waited(deadlines: Deadlines, limit: float, seconds: float) -> tuple[bool, float]:
    """Whether the limit ended it, and after how long."""
    began = time.monotonic()
    try:
        with deadlines.within(limit) as one:
            await asyncio.sleep(seconds)
    except TimeoutError:
        assert one.expired
        return True, time.monotonic() - began
    assert not one.expired
    return False, time.monotonic() - began


@pytest.mark.asyncio
async def test_each_limit_ends_its_own_await_in_time_whatever_their_order() -> None:
    deadlines = Deadlines()
    made = [(5.0, 0.3), (0.4, 5.0), (0.1, 5.0), (0.2, 5.0), (0.2, 0.05), (-1.0, 5.0)]
    found = await asyncio.gather(*(waited(deadlines, *one) for one in made))
    assert [ended for ended, _ in found] == [False, True, True, True, False, True]
    for (limit, seconds), (_, took) in zip(made, found, strict=True):
        assert max(0.0, min(limit, seconds)) - 0.02 <= took < min(limit, seconds) + 1.5


@pytest.mark.asyncio
async def test_one_timer_serves_all_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, made = asyncio.get_running_loop(), []
    deadlines, real = Deadlines(), loop.call_at

    def call_at(*given: Any) -> asyncio.TimerHandle:
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(loop, "call_at", call_at)
    for _ in range(3):
        await asyncio.gather(*(waited(deadlines, 60 + number, 0) for number in range(100)))
    assert len(made) == 3 and all(timer.cancelled() for timer in made)


@pytest.mark.asyncio
async def test_a_limit_that_ends_earlier_takes_the_timer_over(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, made = asyncio.get_running_loop(), []
    deadlines, real = Deadlines(), loop.call_at

    def call_at(*given: Any) -> asyncio.TimerHandle:
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(loop, "call_at", call_at)
    with deadlines.within(60), deadlines.within(50), deadlines.within(55):
        assert [timer.cancelled() for timer in made] == [True, False]
    assert all(timer.cancelled() for timer in made)


@pytest.mark.asyncio
async def test_a_caller_that_cancels_is_obeyed() -> None:
    deadlines = Deadlines()
    task = asyncio.create_task(waited(deadlines, 60, 60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_a_caller_that_cancels_at_the_same_moment_is_obeyed() -> None:
    deadlines = Deadlines()

    async def stubborn() -> tuple[bool, float]:
        return await waited(deadlines, 0.01, 60)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    (limit,) = deadlines.limits
    limit.expire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_an_error_or_a_result_in_the_last_moment_stands() -> None:
    deadlines = Deadlines()
    with pytest.raises(KeyError), deadlines.within(60) as limit:
        limit.expire()
        raise KeyError
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    with pytest.raises(asyncio.CancelledError):  # the cancel is under way; as with asyncio.timeout
        await asyncio.sleep(0)


def test_on_the_loop_that_runs_have() -> None:
    async def three() -> list[tuple[bool, float]]:
        deadlines = Deadlines()
        return await asyncio.gather(*(waited(deadlines, limit, 5.0) for limit in (0.2, 0.1, 0.0305)))

    assert [ended for ended, _ in looping.run(three())] == [True, True, True]


@pytest.mark.asyncio
async def test_a_limit_is_kept_that_begins_while_another_ends() -> None:
    deadlines = Deadlines()
    with pytest.raises(TimeoutError), deadlines.within(0.01):
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            assert (await waited(deadlines, 0.05, 5.0))[0]
            raise


@pytest.mark.parametrize("make", LOOPS)
def test_limits_that_are_due_at_once_end_as_all_others(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def later(deadlines: Deadlines, number: int) -> tuple[bool, float]:
        await asyncio.sleep(0.05 + number * 0.0001)
        return await waited(deadlines, 0.05, 5.0)

    async def all_of_them() -> list[tuple[bool, float]]:
        deadlines = Deadlines()
        first = (waited(deadlines, 0.05 + number * 0.0003, 5.0) for number in range(20))
        return await asyncio.gather(*first, *(later(deadlines, number) for number in range(200)))

    with asyncio.Runner(loop_factory=make) as runner:
        assert [ended for ended, _ in runner.run(all_of_them())] == [True] * 220
