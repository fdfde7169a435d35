"""Limits around a tool: each holds exactly, and a tool without any is left as it is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from midflight.agent import (
    AgentFlow,
    DirectExecutor,
    LastResultGenerator,
    LLMPlanner,
    Query,
    RuleVerifier,
    StopReason,
)
from midflight.engines.scripted import ScriptedEngine
from midflight.tools import (
    ErrorKind,
    InfrastructureError,
    LimitedTool,
    Scope,
    ToolOptions,
    ToolResult,
    Toolset,
    TransientError,
    limits,
    make_toolset,
    tool,
)
from midflight.tools.clock import waiting
from midflight.tools.limits import shortened
from tests.tools.counting import Counting, call, limited


def test_the_calls_of_one_trajectory_are_counted_and_the_next_starts_anew() -> None:
    inner = Counting(lambda n: n)
    answers = ["counting: a", "counting: b", "counting: c", "finish"] * 2
    flow = AgentFlow(
        LLMPlanner(ScriptedEngine(answers), format="compact", grammar=False),
        DirectExecutor(),
        RuleVerifier(),
        LastResultGenerator(),
        Toolset([limited(inner, max_calls=2)]),
    )
    for first in (1, 3):
        trajectory = asyncio.run(flow.run(Query("?")))
        assert [turn.result.text for turn in trajectory.turns[:2]] == [f"a {first}", f"b {first + 1}"]
        assert trajectory.turns[2].result == ToolResult(
            "counting may be called 2 times for one question, and was; use what is known", ErrorKind.CALL_LIMIT
        )
    assert inner.calls == 4


def test_a_trajectory_that_goes_on_has_made_the_calls_of_its_history() -> None:
    inner = Counting(lambda n: n)
    flow = AgentFlow(
        LLMPlanner(ScriptedEngine(lambda request: "counting: a"), format="compact", grammar=False),
        DirectExecutor(),
        RuleVerifier(),
        LastResultGenerator(),
        Toolset([limited(inner, max_calls=2)]),
        max_turns=4,
    )
    first = asyncio.run(flow.run(Query("?"))).turns
    errors = [None, None, ErrorKind.CALL_LIMIT, ErrorKind.CALL_LIMIT]
    assert [turn.result.error for turn in first] == errors and inner.calls == 2
    for done in range(4):
        inner.calls = 0
        turns = asyncio.run(flow.run(Query("?"), history=first[:done])).turns
        assert [turn.result.error for turn in turns] == errors
        assert inner.calls == max(0, 2 - done)


def test_a_call_that_the_infrastructure_lost_is_not_counted() -> None:
    inner = Counting(lambda n: InfrastructureError("down") if n == 1 else n)

    async def calls() -> list[str]:
        async with Scope() as scope:
            made = limited(inner, max_calls=1).scoped(scope)
            with pytest.raises(InfrastructureError):
                await made.call({"text": "a"}, 5.0)
            return [(await made.call({"text": "a"}, 5.0)).text for _ in range(2)]

    first, second = asyncio.run(calls())
    assert first == "a 2" and second.startswith("counting may be called 1 times")


def test_only_transient_failures_are_tried_again_and_as_often_as_said() -> None:
    busy = Counting(lambda n: TransientError("busy", retry_after=0.0) if n < 3 else "done")
    assert call(limited(busy, retries=2)).text == "a done"
    assert busy.calls == 3
    with pytest.raises(TransientError, match="busy"):
        call(limited(Counting(lambda n: TransientError("busy", retry_after=0.0)), retries=1))
    down = Counting(lambda n: InfrastructureError("down"))
    with pytest.raises(InfrastructureError, match="down"):
        call(limited(down, retries=5))
    assert down.calls == 1
    failing = Counting(lambda n: ToolResult("no", ErrorKind.TOOL_ERROR))
    assert call(limited(failing, retries=5)) == ToolResult("no", ErrorKind.TOOL_ERROR)
    assert failing.calls == 1


def test_a_failure_that_stays_is_the_planners_to_read_where_it_can_choose_otherwise() -> None:
    page = Counting(lambda n: TransientError("503", retry_after=0.0, infrastructure=False))
    assert call(limited(page, retries=1)) == ToolResult("503", ErrorKind.TOOL_ERROR)
    assert page.calls == 2


@pytest.mark.parametrize("process", [False, True])
def test_it_is_the_planners_also_of_an_own_tool_without_limits(tmp_path: Path, process: bool) -> None:
    (tmp_path / "mine.py").write_text(
        f"from midflight.tools import TransientError, tool\n\n@tool(process={process})\ndef page(text: str) -> str:\n"
        "    'reads'\n    raise TransientError('503', infrastructure=text == 'service')\n"
    )
    flow = AgentFlow(
        LLMPlanner(ScriptedEngine(["page: a", "page: service"]), format="compact", grammar=False),
        DirectExecutor(),
        RuleVerifier(),
        LastResultGenerator(),
        make_toolset([f"{tmp_path}/mine.py:page"]),
        retries=0,
    )
    trajectory = asyncio.run(flow.run(Query("?")))
    assert [turn.result for turn in trajectory.turns] == [ToolResult("503", ErrorKind.TOOL_ERROR)]
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and trajectory.error == "executor failed: 503"


def test_a_pause_that_does_not_fit_the_time_limit_is_not_waited_for() -> None:
    inner = Counting(lambda n: TransientError("busy", retry_after=600))
    started = time.monotonic()
    with pytest.raises(TransientError):
        call(limited(inner, retries=3, seconds=9))
    assert time.monotonic() - started < 5
    assert inner.calls == 1


def test_the_tools_own_seconds_stand_for_the_agents() -> None:
    inner = Counting(lambda n: n)
    call(limited(inner, seconds=40), seconds=10)
    assert 39 < inner.seconds <= 40
    call(limited(inner, max_calls=1), seconds=10)
    assert 9 < inner.seconds <= 10


def test_a_long_result_keeps_its_ends_and_the_whole_of_it(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(200))
    cut = shortened(ToolResult(text, ErrorKind.TOOL_ERROR), 300)
    assert len(cut.text) <= 300 and cut.error is ErrorKind.TOOL_ERROR and cut.whole == text
    head, _, tail = cut.text.partition("\n[... ")
    left_out, _, tail = tail.partition(" characters left out ...]\n")
    assert text.startswith(head) and text.endswith(tail) and len(head) + int(left_out) + len(tail) == len(text)
    assert len(head) > len(tail) > 50
    short = ToolResult("x" * 300)
    assert shortened(short, 300) is short
    inner = Counting(lambda n: "x" * 500)
    made = limited(inner, tmp_path, cache_hours=1, result_characters=200)
    assert call(made) == call(made)
    assert call(made).whole == "a " + "x" * 500 and inner.calls == 1


def test_the_rate_is_shared_by_all_trajectories() -> None:
    inner = Counting(lambda n: n)
    made = limited(inner, calls_per_minute=600)

    async def three() -> float:
        started = time.monotonic()
        async with Scope() as scope:
            await asyncio.gather(*(made.scoped(scope).call({"text": "a"}, 0.05) for _ in range(3)))
        return time.monotonic() - started

    assert 0.2 <= asyncio.run(three()) < 5.0
    assert inner.seconds > 0.04  # the wait was not the call's


def test_a_retry_waits_for_its_turn_as_well() -> None:
    at: list[float] = []

    def busy(number: int) -> TransientError:
        at.append(time.monotonic())
        return TransientError("busy", retry_after=0.01)

    inner = Counting(busy)
    with pytest.raises(TransientError):
        call(limited(inner, calls_per_minute=300, retries=2, seconds=0.3))  # 0.2 s apart
    assert len(at) == 3 and min(at[1] - at[0], at[2] - at[1]) > 0.19
    assert 0 < inner.seconds <= 0.28  # less than at first by the pauses, not by the turns


def test_pauses_double_and_count_as_the_calls_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.1)
    inner = Counting(lambda number: TransientError("busy"))
    with pytest.raises(TransientError):
        call(limited(inner, retries=9, seconds=1.3))
    assert inner.calls == 4  # after 0.1, 0.2 and 0.4 s; 0.8 more do not fit
    assert inner.seconds <= 0.6


def test_what_a_call_waited_for_its_turn_is_not_taken_from_its_retries() -> None:
    class Queued(Counting):
        async def call(self, arguments: Any, seconds: float) -> ToolResult:
            with waiting():
                await asyncio.sleep(0.3)
            return await super().call(arguments, seconds)

    inner = Queued(lambda number: TransientError("busy", retry_after=0.01) if number == 1 else number)
    assert call(limited(inner, retries=1, seconds=0.25)).text == "a 2"
    assert 0 < inner.seconds <= 0.24


def test_a_limited_tool_looks_like_the_one_inside() -> None:
    @tool
    def shout(text: str) -> str:
        """Say it loudly."""
        return text.upper()

    made = LimitedTool(shout, ToolOptions(max_calls=1), Path("/nowhere"))
    assert (made.name, made.description, made.parameters) == ("shout", "Say it loudly.", shout.parameters)


def test_a_time_out_names_the_whole_limit_not_what_the_last_attempt_had() -> None:
    class Slow(Counting):
        async def call(self, arguments: Any, seconds: float) -> ToolResult:
            await super().call(arguments, seconds)
            return ToolResult(f"counting took longer than {seconds:g} seconds", ErrorKind.TOOL_TIMEOUT)

    def answer(number: int) -> Any:
        return TransientError("busy", retry_after=0.01) if number == 1 else ""

    assert call(limited(Slow(lambda number: ""), retries=1, seconds=3)) == ToolResult(
        "counting took longer than 3 seconds", ErrorKind.TOOL_TIMEOUT
    )
    assert call(limited(Slow(answer), retries=1, seconds=3)) == ToolResult(
        "counting took longer than 3 seconds, with 1 more attempts", ErrorKind.TOOL_TIMEOUT
    )
