import asyncio
import time
from typing import Any

import pytest

from midflight.agent import (
    Answer,
    Claim,
    ErrorKind,
    LLMAnalyst,
    LLMExecutor,
    LLMGenerator,
    LLMVerifier,
    Query,
    StopReason,
    ToolCall,
    ToolResult,
    Turn,
)
from midflight.agent.prompting import request_seed
from midflight.engines.base import EngineError, FinishReason, GenerateRequest, Generation
from midflight.engines.scripted import ScriptedEngine
from midflight.seeds import derive
from midflight.tools.base import InfrastructureError
from tests.agent.doubles import LookupTool, PairTool, compact_flow, population, prompt, user_parts

PERU = Query("How many people live in Peru?", seed=7)


def test_finished() -> None:
    flow, engine = compact_flow([" population: Peru\n", " finish\n"])
    seen: list[Turn] = []
    trajectory = asyncio.run(flow.run(PERU, on_turn=seen.append))
    assert trajectory.stop_reason is StopReason.FINISHED
    assert trajectory.answer == Answer("32933835", (Claim("32933835", (1,)),))
    assert tuple(seen) == trajectory.turns
    first, last = trajectory.turns
    assert (first.index, first.call, first.result) == (
        1,
        ToolCall("population", {"key": "Peru"}),
        ToolResult("32933835"),
    )
    assert (last.index, last.call, last.result, last.verdict.stop) == (
        2,
        ToolCall("finish", {}),
        ToolResult(""),
        False,
    )
    assert user_parts(engine.requests[1]) == (
        "Question: How many people live in Peru?\n",
        "Turn 1: population: Peru\nResult: 32933835\n",
        "Turn 2:",
    )


def test_the_calls_of_all_tools_together_are_bounded_and_the_planner_reads_it() -> None:
    border = LookupTool("border", {"Peru": "Chile"})
    names = ("population: Peru", "nosuch: Peru", "border: Peru", "population: Chad", "border: Peru", "nosuch: Peru")
    executor = ScriptedEngine(lambda request: '{"key": "Peru"}')
    tools = (population(), border)
    flow, engine = compact_flow([*names, "finish"], *tools, executor=LLMExecutor(executor), max_turns=8, max_calls=2)
    trajectory = asyncio.run(flow.run(PERU))
    refused = ToolResult(
        "the 2 calls that one question may have were made; finish with what is known", ErrorKind.CALL_LIMIT
    )
    assert [turn.result.error for turn in trajectory.turns] == [
        None,
        ErrorKind.UNKNOWN_TOOL,  # was no call
        None,
        ErrorKind.CALL_LIMIT,
        ErrorKind.CALL_LIMIT,
        ErrorKind.UNKNOWN_TOOL,
        None,
    ]
    assert [(turn.call, turn.result) for turn in trajectory.turns[3:5]] == [(None, refused), (None, refused)]
    assert trajectory.stop_reason is StopReason.FINISHED
    assert len(tools[0].calls) == len(border.calls) == 1 and len(executor.requests) == 2  # no arguments were written
    assert prompt(engine.requests[4]).endswith(f"Turn 4: population: Chad\nError: call_limit: {refused.text}\nTurn 5:")
    again = asyncio.run(
        compact_flow(["border: Peru"], *tools, max_turns=4, max_calls=2)[0].run(PERU, history=trajectory.turns[:3])
    )
    assert again.turns[3].result == refused and len(border.calls) == 1


def test_verified() -> None:
    verifier = ScriptedEngine(
        [
            "Result: valid\nMemory: insufficient\nContradictions: none\nReason: do not stop: Chad is missing",
            "Result: valid\nMemory: sufficient\nContradictions: none\nReason: all is known\n",
        ]
    )
    flow, planner = compact_flow(["population: Peru", "population: Chad"], verifier=LLMVerifier(verifier))
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.VERIFIED
    assert [turn.verdict.reason for turn in trajectory.turns] == ["do not stop: Chad is missing", "all is known"]
    assert [turn.verdict.stop for turn in trajectory.turns] == [False, True]
    assert [module for module, _ in trajectory.turns[0].other_generations] == ["verifier"]
    assert user_parts(planner.requests[1])[1] == (
        "Turn 1: population: Peru\nResult: 32933835\nVerdict: do not stop: Chad is missing\n"
    )


def test_max_turns_still_answers_and_the_last_turn_is_announced() -> None:
    flow, engine = compact_flow(lambda request: "population: Peru", max_turns=3)
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 3
    assert trajectory.answer == Answer("32933835", (Claim("32933835", (3,)),))
    assert [user_parts(request)[-1] for request in engine.requests] == ["Turn 1:", "Turn 2:", "Turn 3 (last turn):"]


def test_max_seconds_interrupts_a_running_tool_and_keeps_finished_turns() -> None:
    slow = LookupTool("slow", {"x": "late"}, delay=30.0)
    flow, _ = compact_flow(["population: Peru", "slow: x"], population(), slow, max_seconds=0.2)
    started = time.monotonic()
    trajectory = asyncio.run(flow.run(PERU))
    assert time.monotonic() - started < 5
    assert trajectory.stop_reason is StopReason.MAX_SECONDS
    assert [turn.result.text for turn in trajectory.turns] == ["32933835"]
    assert trajectory.answer is None
    assert slow.calls == [{"key": "x"}]


def test_a_timeout_raised_by_a_module_is_not_the_runs_time_limit() -> None:
    flow, _ = compact_flow([TimeoutError("a bug of the engine")])
    with pytest.raises(TimeoutError, match="a bug of the engine"):
        asyncio.run(flow.run(PERU))


def test_context_overflow() -> None:
    flow, _ = compact_flow(lambda request: "population: Peru", max_turns=9, memory_tokens=32)
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert (len(trajectory.turns), trajectory.answer) == (3, None)
    assert trajectory.error == "memory of 3 turns takes 33 of 32 tokens, all folded"


def test_cancel_event_ends_the_run_with_the_finished_turns() -> None:
    async def scenario(cancel_at: str) -> tuple[StopReason, int]:
        cancel = asyncio.Event()
        slow = LookupTool("slow", {"x": "late"}, delay=30.0)
        flow, _ = compact_flow(["population: Peru", "slow: x"], population(), slow)
        if cancel_at == "before":
            cancel.set()
        elif cancel_at == "tool":
            asyncio.get_running_loop().call_later(0.1, cancel.set)
        on_turn = (lambda turn: cancel.set()) if cancel_at == "turn" else None
        trajectory = await asyncio.wait_for(flow.run(PERU, on_turn, cancel), 5)
        assert trajectory.answer is None
        return trajectory.stop_reason, len(trajectory.turns)

    assert asyncio.run(scenario("before")) == (StopReason.CANCELLED, 0)
    assert asyncio.run(scenario("turn")) == (StopReason.CANCELLED, 1)
    assert asyncio.run(scenario("tool")) == (StopReason.CANCELLED, 1)


def test_task_cancellation_propagates() -> None:
    async def scenario() -> None:
        flow, _ = compact_flow(["slow: x"], LookupTool("slow", {"x": "late"}, delay=30.0))
        task = asyncio.create_task(flow.run(PERU))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_retries_fire_and_recover_and_no_call_is_made_twice() -> None:
    tool = LookupTool("population", {"Peru": InfrastructureError("search is down")})
    flow, engine = compact_flow([EngineError("a"), EngineError("b"), "population: Peru", "finish"], tool)
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert trajectory.error == "executor failed: search is down"
    assert (trajectory.answer, trajectory.turns, len(tool.calls), len(engine.requests)) == (None, (), 1, 3)

    flow, engine = compact_flow([EngineError("a"), EngineError("b"), "population: Peru", "finish"])
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.FINISHED
    assert len({request for request in engine.requests[:3]}) == 1


@pytest.mark.parametrize("module", ["planner", "verifier", "generator", "analyst"])
def test_a_dead_engine_ends_in_infrastructure_and_never_in_an_answer(module: str) -> None:
    dead = ScriptedEngine(lambda request: EngineError("no route"))
    choices: dict[str, dict[str, Any]] = {
        "verifier": {"verifier": LLMVerifier(dead)},
        "generator": {"generator": LLMGenerator(dead)},
        "analyst": {"analyst": LLMAnalyst(dead)},
        "planner": {},
    }
    script = (lambda request: EngineError("no route")) if module == "planner" else ["population: Peru", "finish"]
    flow, _ = compact_flow(script, **choices[module], retries=1)
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert trajectory.error == f"{module} failed 2 times: no route"
    assert trajectory.answer is None
    assert len(trajectory.turns) == (2 if module == "generator" else 0)


def test_backoff_doubles() -> None:
    flow, _ = compact_flow(lambda request: EngineError("down"), retries=2, backoff=0.05)
    started = time.monotonic()
    asyncio.run(flow.run(PERU))
    assert 0.15 <= time.monotonic() - started < 2


def test_every_error_kind_is_a_turn_that_the_planner_reads_next() -> None:
    table = {
        "broken": ToolResult("the disk is full", ErrorKind.TOOL_ERROR),
        "slow": ToolResult("after 10 s", ErrorKind.TOOL_TIMEOUT),
    }
    number = LookupTool("number", {}, schema={"type": "integer"})
    script: list[str | Generation | Exception] = [
        "I think\nit is Lima",
        "populatoin: Peru",
        "pair: a b",
        "number: many",
        "work: broken",
        "work: slow",
        Generation("population: Per", FinishReason.LENGTH),
        "finish",
    ]
    flow, engine = compact_flow(script, population(), PairTool(), number, LookupTool("work", table), max_turns=8)
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.stop_reason is StopReason.FINISHED
    assert [turn.result.error for turn in trajectory.turns] == [
        ErrorKind.INVALID_ACTION,
        ErrorKind.UNKNOWN_TOOL,
        ErrorKind.INVALID_ARGUMENTS,
        ErrorKind.INVALID_ARGUMENTS,
        ErrorKind.TOOL_ERROR,
        ErrorKind.TOOL_TIMEOUT,
        ErrorKind.INVALID_ACTION,
        None,
    ]
    expected = 'expected one line "tool: context" or "finish"'
    assert user_parts(engine.requests[-1])[1:-1] == (
        f"Turn 1: I think it is Lima\nError: invalid_action: {expected}\n",
        "Turn 2: populatoin: Peru\nError: unknown_tool: there is no tool 'populatoin'; "
        "valid names: population, pair, number, work, finish\n",
        "Turn 3: pair: a b\nError: invalid_arguments: "
        "pair takes 2 required arguments; only tools with one can be called\n",
        "Turn 4: number: many\nError: invalid_arguments: key of number: expected one integer, got 'many'\n",
        "Turn 5: work: broken\nError: tool_error: the disk is full\n",
        "Turn 6: work: slow\nError: tool_timeout: after 10 s\n",
        f"Turn 7: population: Per\nError: invalid_action: the text was cut off by the token limit; {expected}\n",
    )
    assert trajectory.answer == Answer("")
    assert number.calls == []


def test_a_prompt_repeats_the_parts_of_the_turn_before_up_to_the_tail() -> None:
    flow, engine = compact_flow(lambda request: "population: Peru", max_turns=5)
    asyncio.run(flow.run(PERU))
    for before, after in zip(engine.requests, engine.requests[1:], strict=False):
        assert before.messages[0] == after.messages[0]
        assert user_parts(after)[: len(user_parts(before)) - 1] == user_parts(before)[:-1]
        assert len(user_parts(after)) == len(user_parts(before)) + 1


def test_nothing_of_one_trajectory_is_in_another_in_turn_or_at_once() -> None:
    def answer(request: GenerateRequest) -> str:
        country = "Peru" if "Peru" in user_parts(request)[0] else "Chad"
        return f"population: {country}" if len(user_parts(request)) == 2 else "finish"

    flow, engine = compact_flow(answer)
    chad = Query("How many people live in Chad?")
    alone = asyncio.run(flow.run(PERU)), asyncio.run(flow.run(chad))
    assert "Peru" not in prompt(engine.requests[2]) + prompt(engine.requests[3])
    assert [trajectory.answer and trajectory.answer.text for trajectory in alone] == ["32933835", "17179740"]

    engine.requests.clear()

    async def hundred() -> list[str]:
        done = await asyncio.gather(*(flow.run(query) for query in (PERU, chad) * 50))
        return [trajectory.answer.text if trajectory.answer else "" for trajectory in done]

    assert asyncio.run(hundred()) == ["32933835", "17179740"] * 50
    assert len(engine.requests) == 200
    assert not any("Peru" in prompt(request) and "Chad" in prompt(request) for request in engine.requests)


def test_request_seeds_differ_by_trajectory_module_and_turn_and_repeat() -> None:
    flow, engine = compact_flow(lambda request: "population: Peru", max_turns=2)
    asyncio.run(flow.run(PERU))
    asyncio.run(flow.run(PERU))
    asyncio.run(flow.run(Query(PERU.text, seed=8)))
    asyncio.run(flow.run(Query(PERU.text)))
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds[:2] + seeds[4:6])) == 4
    assert seeds[6:] == [None, None]
    assert seeds[0] == derive(7, "planner", 1) == request_seed(7, "planner", 1)
    assert derive(7, "verifier", 1) != seeds[0]


def test_the_analysis_reaches_planner_verifier_and_generator() -> None:
    verifier, generator = (
        ScriptedEngine(["Result: valid\nMemory: sufficient\nContradictions: none\nReason: ok"]),
        ScriptedEngine(["Answer: 33 million [turn 1]."]),
    )
    flow, planner = compact_flow(
        ["population: Peru"],
        analyst=LLMAnalyst(ScriptedEngine(["\n<think>\nHm.\n</think>\n\n Asks for a\ncount. "])),
        verifier=LLMVerifier(verifier),
        generator=LLMGenerator(generator),
    )
    trajectory = asyncio.run(flow.run(PERU))
    assert trajectory.analysis == "Asks for a\ncount."
    assert user_parts(planner.requests[0])[0] == f"Question: {PERU.text}\nAnalysis: Asks for a count.\n"
    assert "Analysis:\n```\nAsks for a\ncount.\n```\n" in prompt(verifier.requests[0])
    assert "Analysis:\n```\nAsks for a\ncount.\n```\n" in prompt(generator.requests[0])
    assert trajectory.answer == Answer("33 million.", (Claim("33 million.", (1,)),))
