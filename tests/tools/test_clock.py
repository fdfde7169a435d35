"""The time of a call: it stands still while the call waits for its turn, and only then."""

from __future__ import annotations

import asyncio

import pytest

from midflight.tools.clock import TimeLimit, waiting


async def waits_for(turn: asyncio.Event) -> None:
    with waiting():
        await turn.wait()


def test_time_stands_still_for_all_limits_around_until_the_last_task_has_its_turn() -> None:
    async def call() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        first, second = asyncio.Event(), asyncio.Event()
        began = loop.time()
        outer, inner = TimeLimit(None), TimeLimit(0.1)
        with pytest.raises(TimeoutError):
            async with outer, inner:
                tasks = [asyncio.create_task(waits_for(turn)) for turn in (first, second)]
                await asyncio.sleep(0.15)
                first.set()
                await tasks[0]
                assert (outer.waited, inner.waited) == (0.0, 0.0)
                await asyncio.sleep(0.05)
                second.set()
                await tasks[1]
                assert not inner.expired()
                await asyncio.sleep(60)
        assert inner.expired() and not outer.expired()
        return outer.waited, inner.waited, loop.time() - began

    outer, inner, all_of_it = asyncio.run(call())
    assert outer == pytest.approx(inner, abs=0.01) and inner >= 0.2 and 0.3 <= all_of_it < 5


def test_a_task_that_outlives_its_call_or_waits_after_its_end_does_no_harm() -> None:
    async def call() -> None:
        turn = asyncio.Event()
        async with TimeLimit(60):
            late = asyncio.create_task(waits_for(turn))
            await asyncio.sleep(0)
        turn.set()
        await late
        with pytest.raises(TimeoutError):
            async with TimeLimit(0.01):
                try:
                    await asyncio.sleep(60)
                finally:
                    await waits_for(turn)

    asyncio.run(call())


def test_an_event_loop_in_a_thread_of_the_call_does_not_touch_its_limit() -> None:
    async def inner() -> float:
        async with TimeLimit(60) as limit:
            with waiting():
                await asyncio.sleep(0.01)
            return limit.waited

    async def call() -> tuple[float, float]:
        async with TimeLimit(60) as limit:
            return await asyncio.to_thread(asyncio.run, inner()), limit.waited

    within, around = asyncio.run(call())
    assert within >= 0.01 and around == 0.0
