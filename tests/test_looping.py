"""The event loop of a run: what runs on it, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import math

import pytest

from midflight import looping


async def seen() -> tuple[str, int]:
    return type(asyncio.get_running_loop()).__module__, gc.get_threshold()[0]


def test_a_run_has_the_loop_that_is_named_and_its_own_collector_settings() -> None:
    before = gc.get_threshold()
    module, young = looping.run(seen())
    assert module.startswith(looping.loop_name()) and young == looping.YOUNG_OBJECTS
    assert gc.get_threshold() == before


def test_settings_come_back_after_an_error_too() -> None:
    before = gc.get_threshold()

    async def fails() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        looping.run(fails())
    assert gc.get_threshold() == before


@pytest.mark.parametrize("there", [True, False])
def test_without_uvloop_it_is_asyncios_loop(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there and name == "uvloop" else None)
    assert looping.loop_name() == ("uvloop" if there else "asyncio")
    if not there:
        assert looping.run(seen())[0].startswith("asyncio")


@pytest.mark.asyncio
async def test_work_starts_a_few_at_a_time_and_the_rest_gets_on_meanwhile() -> None:
    begun: list[int] = []
    seen: list[int] = []

    async def one(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0)
        seen.append(len(begun))  # what had begun when this one went on
        return number

    async with asyncio.TaskGroup() as group:
        tasks = await looping.start(group, (one(number) for number in range(3 * looping.STARTED_AT_ONCE)))
    count = 3 * looping.STARTED_AT_ONCE
    assert [task.result() for task in tasks] == begun == list(range(count))
    assert seen[0] < count and seen[-1] == count


@pytest.mark.asyncio
@pytest.mark.parametrize("busy, rounds", [(math.inf, [8] * 12 + [4]), (0.0, [8, 32, 32, 28])], ids=["quick", "long"])
async def test_more_begin_in_a_round_while_rounds_are_long(
    busy: float, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looping, "BUSY", busy)
    begun = 0
    seen: list[int] = []

    async def one() -> None:
        nonlocal begun
        begun += 1

    async def watch() -> None:
        while begun < 100:
            before = begun
            await asyncio.sleep(0)
            if begun > before:
                seen.append(begun - before)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        await looping.start(group, (one() for _ in range(100)))
    assert seen == rounds


@pytest.mark.asyncio
async def test_what_is_not_started_yet_is_never_begun_when_one_fails() -> None:
    begun: list[int] = []

    async def one(number: int) -> None:
        begun.append(number)
        raise ValueError(str(number))

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            await looping.start(group, (one(number) for number in range(10 * looping.STARTED_AT_ONCE)))
    assert begun == list(range(looping.STARTED_AT_ONCE))
