"""Whose time it was when the time limit ended a trajectory: that of its engines, or its own."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from midflight.agent import LLMExecutor, LLMPlanner, LLMVerifier, Query, StopReason, ToolResult
from midflight.agent.types import Action, ToolCall, Trajectory, Turn, Verdict
from midflight.engines.base import FinishReason, GenerateRequest, Generation
from midflight.engines.scripted import ScriptedEngine
from midflight.engines.waits import OF_TRAJECTORY, Waits
from midflight.tools.language.asking import ask
from tests.agent.doubles import BoxTool, LookupTool, compact_flow

PERU = Query("How many people live in Peru?", seed=7)
WAITED = "{} s had been waited for engines at the time limit, longest by the {}"


@pytest.mark.parametrize(
    ("delay", "tool_delay", "reason"),
    [(30.0, 0.0, StopReason.INFRASTRUCTURE), (0.3, 0.6, StopReason.MAX_SECONDS)],
)
def test_time_that_one_wait_for_an_engine_took_is_not_the_agents(
    delay: float, tool_delay: float, reason: StopReason
) -> None:
    slow = LookupTool("slow", {"x": "late"}, delay=tool_delay)
    flow, _ = compact_flow([], slow, max_seconds=1.0)
    engine = ScriptedEngine(lambda request: "slow: x", delay=delay)
    flow = replace(flow, planner=LLMPlanner(engine, format="compact"))
    trajectory = asyncio.run(flow.run(PERU))
    assert (trajectory.stop_reason, trajectory.answer) == (reason, None)
    told = re.fullmatch(WAITED.format(r"1\.\d", "planner"), trajectory.error)
    assert (told is not None) == trajectory.stop_reason.lost


@pytest.mark.parametrize(
    ("delay", "tool_delay", "reason"), [(30.0, 0.0, StopReason.INFRASTRUCTURE), (0.1, 30.0, StopReason.MAX_SECONDS)]
)
def test_an_executors_wait_for_its_engine_is_not_the_agents_but_its_tools_is(
    delay: float, tool_delay: float, reason: StopReason
) -> None:
    slow = LookupTool("slow", {"x": "late"}, delay=tool_delay)
    writer = LLMExecutor(ScriptedEngine(lambda request: '{"key": "x"}', delay=delay))
    flow, _ = compact_flow(lambda request: "slow: x", slow, max_seconds=0.5, executor=writer)
    trajectory = asyncio.run(flow.run(PERU))
    assert (trajectory.stop_reason, len(slow.calls)) == (reason, int(delay < 1))
    told = re.fullmatch(WAITED.format(r"0\.[56]", "executor"), trajectory.error)
    assert (told is not None) == trajectory.stop_reason.lost


class FakeTime(asyncio.SelectorEventLoop):
    """Its time is what the test says."""

    now = 0.0

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("waits", "error"),
    [
        ({"planner": 20, "executor": 5, "verifier": 5}, WAITED.format("85.0", "planner")),
        ({"planner": 0, "executor": 5, "verifier": 20}, WAITED.format("55.0", "verifier")),
        ({"planner": 0, "executor": 18, "verifier": 0}, WAITED.format("54.0", "executor")),
        ({"planner": 5, "executor": 5, "verifier": 10}, ""),  # 50 of 100
        ({"planner": 0, "executor": 0, "verifier": 0}, ""),
    ],
)
def test_all_waits_for_engines_count_together_and_those_of_tools_do_not(waits: dict[str, int], error: str) -> None:
    loop = FakeTime()

    def module(name: str, says: str) -> ScriptedEngine:
        def answer(request: GenerateRequest) -> str:
            loop.now += waits[name]
            return says

        return ScriptedEngine(answer)

    class Slow(LookupTool):
        async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
            result = await super().call(arguments, seconds)
            if len(self.calls) == 3:  # runs into the time limit
                loop.now += 1000
                await asyncio.Event().wait()
            loop.now += 7
            return result

    flow, _ = compact_flow([], Slow("slow", {"x": "late"}), max_seconds=100, tool_seconds=10_000, clock=loop.time)
    flow = replace(
        flow,
        planner=LLMPlanner(module("planner", "slow: x"), format="compact"),
        executor=LLMExecutor(module("executor", '{"key": "x"}')),
        verifier=LLMVerifier(module("verifier", "no verdict")),
    )
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        trajectory = runner.run(flow.run(PERU))
    assert trajectory.stop_reason is (StopReason.INFRASTRUCTURE if error else StopReason.MAX_SECONDS)
    assert (trajectory.error, len(trajectory.turns)) == (error, 2)


@pytest.mark.parametrize(("waits", "reason"), [(61.0, StopReason.INFRASTRUCTURE), (39.0, StopReason.MAX_SECONDS)])
def test_what_a_tool_waits_for_its_engine_is_not_the_agents_time(waits: float, reason: StopReason) -> None:
    loop = FakeTime()

    class Stalled(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            loop.now += waits
            return await loop.create_future()

    class Asking(LookupTool):
        async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
            loop.now += 100.0 - waits
            return ToolResult(await ask(Stalled([]), "answer", "what?", 5))

    flow, _ = compact_flow(lambda _: "slow: x", Asking("slow", {}), max_seconds=100, tool_seconds=500, clock=loop.time)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        trajectory = runner.run(flow.run(PERU))
    assert trajectory.stop_reason is reason
    assert trajectory.error == (WAITED.format("61.0", "tools") if reason.lost else "")


def test_of_waits_at_once_the_last_to_end_ends_the_time_that_is_not_the_agents() -> None:
    loop = FakeTime()

    class Answering(ScriptedEngine):
        def __init__(self, seconds: float) -> None:
            super().__init__([])
            self.seconds = seconds

        async def generate(self, request: GenerateRequest) -> Generation:
            if self.seconds == 10:
                await asyncio.sleep(0)  # the other is begun
                loop.now += 10
                return Generation("ok", FinishReason.STOP)
            return await loop.create_future()

    class Asking(LookupTool):
        async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
            asked = [asyncio.create_task(ask(Answering(one), "answer", "what?", 500)) for one in (10, 90)]
            await asked[0]
            loop.now += 90
            await asked[1]
            raise AssertionError

    flow, _ = compact_flow(lambda _: "slow: x", Asking("slow", {}), max_seconds=100, tool_seconds=500, clock=loop.time)

    async def run() -> Trajectory:
        trajectory = await flow.run(PERU)
        assert OF_TRAJECTORY.get() is None  # what is asked behind it is no wait of this one
        return trajectory

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        trajectory = runner.run(run())
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert trajectory.error == WAITED.format("100.0", "tools")


def test_a_module_that_waits_while_a_tools_ask_goes_on_is_told_of_by_its_own_name() -> None:
    now = 0.0
    waits = Waits(lambda: now)
    with waits.of_tool():
        now = 1.0
        waits.begin("verifier")
        now = 3.0
    assert waits.of_module
    now = 6.0
    waits.end()
    assert waits.seconds == {"tools": 1.0, "verifier": 5.0} and not waits.of_module


def test_waits_of_calls_that_are_made_again_are_not_those_of_what_is_new() -> None:
    loop = FakeTime()

    class Asking(BoxTool):
        async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
            if arguments["text"] == "ask":

                def late(request: GenerateRequest) -> str:
                    loop.now += 80
                    return "ok"

                return ToolResult(await ask(ScriptedEngine(late), "answer", "what?", 500))
            loop.now += 200
            return ToolResult(await loop.create_future())

    flow, _ = compact_flow(lambda _: "box: put x", Asking(), max_seconds=100, tool_seconds=500, clock=loop.time)
    asked = Action("", "box", "ask"), ToolCall("box", {"text": "ask"}), ToolResult("ok"), Verdict(stop=False), 80.0
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        trajectory = runner.run(flow.run(PERU, history=[Turn(1, Generation("box: ask", FinishReason.STOP), *asked)]))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.MAX_SECONDS, "")
