"""A run that goes on behind finished turns is the run that was never interrupted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
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
    Query,
    StopReason,
    Trajectory,
    Turn,
)
from midflight.engines.base import GenerateRequest
from midflight.engines.scripted import ScriptedEngine
from tests.agent.doubles import compact_flow, user_parts

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
