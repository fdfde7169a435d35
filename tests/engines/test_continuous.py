"""Continuous batching on a tiny model: who joins a running batch, who waits, and that nothing is drawn differently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import EngineError, GenerateRequest, Generation, Message, Sampling
from midflight.engines.local import LocalEngine, load
from midflight.engines.local import engine as engine_module
from midflight.engines.local.decoding import LAPS, generate
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

SYSTEM = Message("system", ("Answer.\n",))
WARM = Sampling(temperature=0.8, max_tokens=12, seed=1)
NO_END = "start: /[a-z ]{200}/\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many requests each batch began with."""
    seen: list[int] = []

    def counted(model: Any, tree: Any, masks: Any, rows: Any, arrivals: Any = None, **how: Any) -> None:
        seen.append(len(rows))
        generate(model, tree, masks, rows, arrivals, **how)

    monkeypatch.setattr(engine_module, "generate", counted)
    yield seen


def asked(*parts: str, grammar: str | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest((SYSTEM, Message("user", parts)), replace(WARM, **sampling), grammar)


def run(folder: Path, waves: Sequence[Sequence[GenerateRequest]], **settings: Any) -> list[Generation]:
    """The waves' requests; each wave is sent when a forward of the one before has begun. In order of the requests."""
    engine = LocalEngine(load(str(folder)), chat_template=False, **settings)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    engine.model.register_forward_pre_hook(count)

    async def all_waves() -> list[Generation]:
        tasks: list[asyncio.Task[Generation]] = []
        for wave in waves:
            before = forwards
            tasks += [asyncio.create_task(engine.generate(one)) for one in wave]
            while forwards < before + 3 and not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks)

    try:
        return asyncio.run(all_waves())
    finally:
        engine.close()


def alone(folder: Path, requests: Sequence[GenerateRequest]) -> list[Generation]:
    return [run(folder, [[one]])[0] for one in requests]


def assert_same(found: Sequence[Generation], expected: Sequence[Generation]) -> None:
    assert [one.ids for one in found] == [one.ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert (one.forced, one.finish_reason, one.prompt_ids) == (other.forced, other.finish_reason, other.prompt_ids)


LONG = [asked("A question\n", f"number {n}:", grammar=NO_END, seed=n, max_tokens=60) for n in range(3)]
LATE = [
    asked("A question\n", "x:", seed=7, max_tokens=9),
    asked("A question\n", "x:", seed=8, max_tokens=9),
    asked("A question\n", "yy:", seed=9, max_tokens=5, temperature=0.0),
    asked("A question\n", "z:", grammar='start: "one way" ("!" | "?")\n', seed=3),
    asked("A question\n", "z:", grammar='start: "only"\n'),
]


def test_late_requests_join_and_draw_what_they_would_alone(folder: Path, batches: list[int]) -> None:
    found = run(folder, [LONG, LATE[:2], LATE[2:]], continuous=True)
    assert batches == [3]
    assert found[-1].text == "only" and all(found[-1].forced)
    batches.clear()
    assert_same(found, alone(folder, [*LONG, *LATE]))


def test_without_it_they_wait_for_the_batch_to_end(folder: Path, batches: list[int]) -> None:
    found = run(folder, [LONG, LATE[:2], LATE[2:]])
    assert batches == [3, 5]
    assert_same(found, alone(folder, [*LONG, *LATE]))


def test_a_short_request_is_answered_while_a_long_one_goes_on(folder: Path) -> None:
    engine = LocalEngine(load(str(folder)), chat_template=False, continuous=True)
    order: list[str] = []

    async def both() -> None:
        async def one(name: str, request: GenerateRequest) -> None:
            await engine.generate(request)
            order.append(name)

        await asyncio.gather(one("long", LONG[0]), one("short", replace(LATE[0], sampling=replace(WARM, max_tokens=2))))

    asyncio.run(both())
    assert order == ["short", "long"]
    engine.close()


def test_what_does_not_fit_waits_and_nothing_overtakes_it(folder: Path, batches: list[int]) -> None:
    other_trunk = replace(LATE[0], messages=(Message("system", ("Something else.\n",)), Message("user", ("Q", "x:"))))
    found = run(folder, [LONG, [other_trunk, LATE[1]]], continuous=True)
    assert batches == [3, 2]
    assert_same(found, alone(folder, [*LONG, other_trunk, LATE[1]]))
    batches.clear()
    long_prompt = asked("A question\n", "word " * 40, seed=2, max_tokens=4)  # longer than all columns so far
    found = run(folder, [LONG, [long_prompt, LATE[1]]], continuous=True)
    assert batches == [3, 2]
    assert_same(found, alone(folder, [*LONG, long_prompt, LATE[1]]))


def test_no_more_than_max_batch_at_a_time(folder: Path, batches: list[int]) -> None:
    found = run(folder, [LONG, LATE[:2]], continuous=True, max_batch=4)
    assert batches[0] == 3
    assert_same(found, alone(folder, [*LONG, *LATE[:2]]))


def test_a_batch_that_runs_out_of_columns_ends_and_the_next_goes_on(folder: Path, batches: list[int]) -> None:
    rounds = 8 * LAPS
    waves = [[replace(LONG[0], sampling=replace(LONG[0].sampling, seed=n, max_tokens=8))] for n in range(rounds)]
    found = run(folder, waves, continuous=True)
    assert len(batches) > 1
    assert_same(found, alone(folder, [wave[0] for wave in waves]))


def test_the_prefix_tree_keeps_to_its_bound_while_a_batch_runs(folder: Path, batches: list[int]) -> None:
    engine = LocalEngine(load(str(folder)), chat_template=False, continuous=True, max_batch=2, prefix_tokens=60)
    seen: list[int] = []
    engine.model.register_forward_pre_hook(lambda *_: seen.append(engine._prefixes.tokens))
    words = "word " * 10
    long = asked("A question\n", f"long, {words}:", grammar=NO_END, max_tokens=120)
    short = [asked("A question\n", f"{n} {words}:", seed=n, max_tokens=2) for n in range(10)]  # one joins at a time

    async def all_of_them() -> list[Generation]:
        running = asyncio.create_task(engine.generate(long))
        while not seen:
            await asyncio.sleep(0.001)
        return [*await asyncio.gather(*map(engine.generate, short)), await running]

    found = asyncio.run(all_of_them())
    engine.close()
    assert batches == [1]
    most = max(len(one.prompt_ids) + 2 for one in found)
    assert sum(len(one.prompt_ids) for one in found) > 700
    assert max(seen) <= 60 + 3 * most  # the long one, one that ended and one that came
    assert_same(found, alone(folder, [*short, long]))


def test_a_failed_forward_fails_what_is_running_and_the_rest_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(*arguments: Any, **how: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no")
        generate(*arguments, **how)

    monkeypatch.setattr(engine_module, "generate", failing)
    engine = LocalEngine(load(str(folder)), chat_template=False, continuous=True)
    with pytest.raises(EngineError, match="local engine: RuntimeError: no"):
        asyncio.run(engine.generate(LATE[0]))
    assert_same([asyncio.run(engine.generate(LATE[0]))], alone(folder, [LATE[0]]))
    engine.close()


@pytest.mark.parametrize("continuous", [True, False])
def test_a_request_that_is_gone_is_not_drawn_to_its_end(folder: Path, continuous: bool) -> None:
    engine = LocalEngine(load(str(folder)), chat_template=False, continuous=continuous)
    long, beside = asked("x", grammar=NO_END, max_tokens=180), asked("hello", max_tokens=12)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    engine.model.register_forward_pre_hook(count)

    async def cancelled_meanwhile() -> Generation:
        gone, other = asyncio.create_task(engine.generate(long)), asyncio.create_task(engine.generate(beside))
        while forwards < 3:
            await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.wait([gone])
        found = await other
        await engine.generate(asked("next", max_tokens=1))  # waits for what runs
        return found

    try:
        found = asyncio.run(cancelled_meanwhile())
    finally:
        engine.close()
    assert_same([found], alone(folder, [beside]))
    assert engine.generated_tokens < 150


def test_a_prompt_of_nothing_is_refused_before_it_meets_others(folder: Path) -> None:
    engine = LocalEngine(load(str(folder)), chat_template=False)
    with pytest.raises(EngineError, match="needs a prompt of at least one token"):
        asyncio.run(engine.generate(GenerateRequest((Message("user", ("",)),), WARM)))
    engine.close()
