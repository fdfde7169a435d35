"""A run that goes on behind finished turns is the run that was never interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from midflight.agent import (
    AgentFlow,
    Answer,
    Claim,
    LLMAnalyst,
    LLMGenerator,
    LLMVerifier,
    NotReplayable,
    Query,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)
from midflight.engines.base import GenerateRequest
from midflight.engines.scripted import ScriptedEngine
from midflight.errors import InfrastructureError
from midflight.tools import ErrorKind, ToolOptions, ToolResult
from midflight.tools.hiding import HidingTool
from midflight.tools.limits import LimitedTool
from tests.agent.doubles import BoxTool, compact_flow, population, user_parts

PERU = Query("How many people live in Peru?", seed=7)


def by_seed(request: GenerateRequest) -> str:
    """Draws an action with the request's seed."""
    actions = ["population: Peru", "population: Chad", "population: #1", "nosuch: x", "not an action", "finish"]
    return Random(request.sampling.seed).choice(actions)


def flow_by_seed(**settings: Any) -> tuple[AgentFlow, ScriptedEngine]:
    return compact_flow(by_seed, clock=lambda: 0.0, max_turns=4, **settings)


def test_a_run_that_goes_on_behind_any_turn_equals_the_undisturbed_run() -> None:
    flow, engine = flow_by_seed(grounded=True)
    stops = set()
    for seed in range(20):
        query = replace(PERU, seed=seed)
        whole = asyncio.run(flow.run(query))
        stops.add(whole.stop_reason)
        for done in range(len(whole.turns) + 1):
            engine.requests.clear()
            seen: list[Turn] = []
            resumed = asyncio.run(flow.run(query, seen.append, history=whole.turns[:done]))
            assert resumed == whole
            assert tuple(seen) == whole.turns[done:]
            assert len(engine.requests) == len(whole.turns) - done
    assert stops == {StopReason.FINISHED, StopReason.MAX_TURNS}


def test_another_seed_goes_on_another_way_from_the_same_turns() -> None:
    flow, engine = flow_by_seed()
    first = asyncio.run(flow.run(PERU)).turns[:1]
    engine.requests.clear()
    made = [asyncio.run(flow.run(replace(PERU, seed=seed), history=first)) for seed in range(8)]
    assert {trajectory.turns[0] for trajectory in made} == set(first)
    assert len({tuple(turn.generation.text for turn in trajectory.turns) for trajectory in made}) > 4
    assert user_parts(engine.requests[0])[-1] == "Turn 2:"


@pytest.mark.parametrize(
    ("script", "verdicts", "settings", "reason"),
    [
        (["population: Peru", "finish"], "continue", {}, StopReason.FINISHED),
        (["population: Peru"], "stop", {}, StopReason.VERIFIED),
        (["population: Peru"], "continue", {"max_turns": 1}, StopReason.MAX_TURNS),
    ],
)
def test_behind_a_turn_that_ended_its_run_only_the_answer_is_made(
    script: list[str], verdicts: str, settings: dict[str, Any], reason: StopReason
) -> None:
    memory = "sufficient" if verdicts == "stop" else "insufficient"
    verifier = ScriptedEngine(lambda _: f"Result: valid\nMemory: {memory}\nContradictions: none\nReason: so")
    generator = ScriptedEngine(lambda request: "Answer: Many [turn 1].")
    modules = {"verifier": LLMVerifier(verifier), "generator": LLMGenerator(generator), "clock": lambda: 0.0}
    flow, planner = compact_flow(script, **modules, **settings)
    whole = asyncio.run(flow.run(PERU))
    assert whole.stop_reason is reason
    for engine in (verifier, planner):
        engine.requests.clear()
    assert asyncio.run(flow.run(PERU, history=whole.turns)) == whole
    assert (planner.requests, verifier.requests) == ([], [])
    assert generator.requests[0] == generator.requests[1]
    assert whole.answer == Answer("Many.", (Claim("Many.", (1,)),))


def test_an_analysis_that_is_given_is_not_made_again() -> None:
    analyst = ScriptedEngine(["made"])
    flow, planner = compact_flow(lambda request: "finish", analyst=LLMAnalyst(analyst))

    def analysed(**given: Any) -> Trajectory:
        return asyncio.run(flow.run(PERU, **given))

    assert analysed(analysis="given").analysis == "given"
    assert analysed(analysis="").analysis == ""
    assert analyst.requests == []
    assert [user_parts(request)[0] for request in planner.requests] == [
        f"Question: {PERU.text}\nAnalysis: given\n",
        f"Question: {PERU.text}\n",
    ]
    assert analysed().analysis == "made"


def test_turns_out_of_place_are_refused() -> None:
    flow, _ = flow_by_seed()
    turns = asyncio.run(compact_flow(lambda request: "population: Peru", max_turns=3)[0].run(PERU)).turns
    with pytest.raises(ValueError, match="turn 2 cannot follow 0 turns"):
        asyncio.run(flow.run(PERU, history=turns[1:]))


BOXED = ("box: see", "population: Peru", "box: put gold", "box: put red", "population: Chad", "box: see", "finish")


def unexpected(turn: Turn, result: ToolResult) -> None:
    raise AssertionError(f"turn {turn.index} gave {result}")


def test_what_tools_hold_is_there_again_and_other_tools_are_not_called_again() -> None:
    box, people = BoxTool(), population()
    flow, engine = compact_flow(
        lambda request: BOXED[len(user_parts(request)) - 2], box, people, clock=lambda: 0.0, max_turns=7
    )
    whole = asyncio.run(flow.run(PERU))
    assert [turn.result.text for turn in whole.turns] == ["empty", "32933835", "done", "done", "17179740", "red", ""]
    for done in range(len(BOXED) + 1):
        for calls in (box.calls, people.calls, engine.requests):
            calls.clear()
        seen = list[Turn]()
        resumed = asyncio.run(flow.run(PERU, seen.append, history=whole.turns[:done], on_difference=unexpected))
        assert resumed == whole and tuple(seen) == whole.turns[done:]
        assert box.calls == ["see", "put gold", "put red", "see"]
        assert len(people.calls) == sum(action.startswith("population") for action in BOXED[done:])
        assert len(engine.requests) == len(BOXED) - done


def test_calls_that_are_made_again_are_counted_once_and_refused_ones_are_not_made() -> None:
    box = BoxTool()

    def flow_of(max_calls: int) -> AgentFlow:
        made = LimitedTool(HidingTool(box, ["secret"]), ToolOptions(max_calls=max_calls), Path("/nowhere"))
        return compact_flow(lambda request: "box: put gold", made, clock=lambda: 0.0, max_turns=4)[0]

    flow = flow_of(2)
    whole = asyncio.run(flow.run(PERU))
    limit = ErrorKind.CALL_LIMIT
    assert [turn.result.error for turn in whole.turns] == [None, None, limit, limit]
    for done in range(5):
        box.calls.clear()
        assert asyncio.run(flow.run(PERU, history=whole.turns[:done])) == whole
        assert len(box.calls) == 2
    box.calls.clear()
    more = asyncio.run(flow_of(9).run(PERU, history=whole.turns[:3], on_difference=unexpected))
    assert more.turns[3].result.error is None and len(box.calls) == 3


def test_a_call_that_gives_another_result_is_told_and_memory_keeps_the_recorded_one() -> None:
    actions = ("box: put gold", "population: Peru", "box: see", "finish")

    def run(box: BoxTool, history: tuple[Turn, ...], told: list[tuple[int, str]]) -> Trajectory:
        flow, _ = compact_flow(lambda request: actions[len(user_parts(request)) - 2], box, population())
        return asyncio.run(
            flow.run(PERU, history=history, on_difference=lambda turn, now: told.append((turn.index, now.text)))
        )

    first, told = run(BoxTool(), (), []), list[tuple[int, str]]()
    again = run(BoxTool(extra="!"), first.turns[:3], told)
    assert told == [(1, "done!"), (3, "gold!")]
    assert again.turns[:3] == first.turns[:3] and again.answer == first.answer


@dataclass
class Failing(BoxTool):
    """Fails with its infrastructure, or waits, when it is called for the n-th time."""

    fails: int = 0
    waits: int = 0

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        result = await super().call(arguments, seconds)
        if len(self.calls) == self.fails:
            raise InfrastructureError("no sandbox")
        if len(self.calls) == self.waits:
            await asyncio.sleep(0.3)
        return result


def test_a_call_that_cannot_be_made_again_for_lack_of_infrastructure_ends_the_run() -> None:
    first = asyncio.run(compact_flow(("box: put gold", "finish"), BoxTool())[0].run(PERU)).turns[:1]
    for retries, reason in ((1, StopReason.FINISHED), (0, StopReason.INFRASTRUCTURE)):
        box = Failing(fails=1)
        made = asyncio.run(compact_flow(["finish"], box, retries=retries)[0].run(PERU, history=first))
        assert made.stop_reason is reason and box.calls == ["put gold"] * (retries + 1)
    assert made.error == "executor failed 1 times: no sandbox" and made.turns == first


def test_the_time_limit_begins_behind_the_calls_that_are_made_again_and_cancelling_ends_them() -> None:
    first = asyncio.run(compact_flow(("box: put gold", "finish"), BoxTool())[0].run(PERU)).turns[:1]
    slow, _ = compact_flow(["finish"], Failing(waits=1), max_seconds=0.2)
    assert asyncio.run(slow.run(PERU, history=first)).stop_reason is StopReason.FINISHED

    async def cancelled() -> Trajectory:
        cancel = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, cancel.set)
        return await compact_flow(["finish"], Failing(waits=1))[0].run(PERU, cancel=cancel, history=first)

    ended = asyncio.run(cancelled())
    assert (ended.stop_reason, ended.turns, ended.seconds < 0.25) == (StopReason.CANCELLED, first, True)


def test_calls_that_the_toolset_does_not_know_or_take_are_refused() -> None:
    first = asyncio.run(compact_flow(("box: put gold", "finish"), BoxTool())[0].run(PERU)).turns[:1]
    flow, engine = compact_flow(lambda request: "finish")
    unknown = "the call of box in turn 1 cannot be made again: no tool named 'box'; valid names: population, finish"
    with pytest.raises(NotReplayable, match=unknown):
        asyncio.run(flow.run(PERU, history=first))
    boxed, _ = compact_flow(lambda request: "finish", BoxTool())
    with pytest.raises(NotReplayable, match="in turn 1 cannot be made again: text: 3 is not of type 'string'"):
        asyncio.run(boxed.run(PERU, history=[replace(first[0], call=ToolCall("box", {"text": 3}))]))
    assert engine.requests == []
