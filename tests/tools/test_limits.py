"""Limits around a tool: each holds exactly, and a tool without any is left as it is."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
import time
from collections.abc import Callable
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
from midflight.errors import UserError
from midflight.tools import (
    ErrorKind,
    InfrastructureError,
    LimitedTool,
    Scope,
    ToolContext,
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
from tests.agent.doubles import BoxTool


class Counting:
    """Answers with what `answer` gives, and counts."""

    name = "counting"
    description = "counts"
    parameters: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def __init__(self, answer: Callable[[int], Any]) -> None:
        self.answer, self.calls, self.seconds = answer, 0, 0.0

    async def call(self, arguments: Any, seconds: float) -> ToolResult:
        self.calls += 1
        self.seconds = seconds
        value = self.answer(self.calls)
        if isinstance(value, Exception):
            raise value
        return value if isinstance(value, ToolResult) else ToolResult(f"{arguments['text']} {value}")


def limited(inner: Counting, folder: Path = Path("/nowhere"), **options: Any) -> LimitedTool:
    return LimitedTool(inner, ToolOptions(**options), folder)


def call(made: Any, text: str = "a", seconds: float = 5.0) -> ToolResult:
    return asyncio.run(made.call({"text": text}, seconds))


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


def test_what_holds_something_for_a_trajectory_is_not_answered_from_the_cache() -> None:
    options = {"box": {"cache_hours": 2}}
    with pytest.raises(UserError) as refused:
        make_toolset(["box"], options, given=[BoxTool()])
    assert str(refused.value) == (
        "agent.tool_options.box.cache_hours = 2: box holds something for a trajectory, which an answer from the cache "
        "would leave as it is; leave it out"
    )
    assert make_toolset(["box"], {"box": {"max_calls": 2}}, given=[BoxTool()]).holds("box")


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


def test_the_cache_holds_every_argument_tool_and_option_and_only_what_succeeded(tmp_path: Path) -> None:
    inner = Counting(lambda n: n)
    made = limited(inner, tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text, call(made, "b").text, call(made).text] == ["a 1", "a 1", "b 2", "a 1"]
    again = limited(Counting(lambda n: "new"), tmp_path, cache_hours=1, retries=2, max_calls=9)
    assert call(again).text == "a 1"  # limits are no part of the key

    class Own(ToolOptions):
        depth: int = 1

    deeper = LimitedTool(Counting(lambda n: "deep"), Own(cache_hours=1, depth=2), tmp_path)
    assert call(deeper).text == "a deep"
    failing = Counting(lambda n: ToolResult("no", ErrorKind.TOOL_ERROR))
    for _ in range(2):
        assert call(limited(failing, tmp_path, cache_hours=1), "c").error is ErrorKind.TOOL_ERROR
    assert failing.calls == 2
    for entry in (tmp_path / "results" / "counting").iterdir():
        import os

        os.utime(entry, (0, time.time() - 3601))
    assert call(made).text == "a 3"


def test_another_version_of_midflight_answers_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = limited(Counting(lambda n: n), tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 1"]
    monkeypatch.setattr(limits, "__version__", "another")
    assert call(made).text == "a 2"


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


@pytest.mark.parametrize("key", ["", "k-12345678"])  # what is hidden is so by a layer around the tool
def test_tools_of_one_name_share_no_answers(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", key)
    code = "from midflight.tools import tool\n\n@tool\ndef area(text: str) -> str:\n    'area'\n    return {!r}\n"
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(code.format(name))

    def answer(place: str) -> str:
        options = {"area": {"cache_hours": 1}}
        made = make_toolset([place], options, ToolContext(cache_folder=tmp_path / "cache")).get("area")
        assert made is not None
        return call(made).text

    places = [f"{tmp_path}/{name}.py:area" for name in ("one", "other")]
    assert [answer(place) for place in places] == ["one", "other"]
    (tmp_path / "one.py").write_text(code.format("edited"))
    monkeypatch.delitem(sys.modules, f"midflight_own:{(tmp_path / 'one.py').resolve()}")
    assert [answer(place) for place in places] == ["edited", "other"]
    assert len(list((tmp_path / "cache" / "results" / "area").iterdir())) == 3


def test_the_cache_is_not_touched_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    for name in ("_read", "_write"):
        inner = getattr(limits, name)

        def seen(*arguments: Any, inner: Any = inner) -> Any:
            threads.append(threading.get_ident())
            return inner(*arguments)

        monkeypatch.setattr(limits, name, seen)
    made = limited(Counting(lambda n: n), tmp_path, cache_hours=1)
    assert [call(made).text for _ in range(2)] == ["a 1", "a 1"]
    assert len(threads) == 3 and threading.get_ident() not in threads


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


def test_a_cache_that_cannot_be_written_costs_no_result_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(one: object, other: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(limits.os, "replace", full)
    made = limited(Counting(lambda number: number), tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 2"]
    folder = tmp_path / "results" / "counting"
    assert capsys.readouterr().err == (
        f"counting: the cache of results {folder} cannot be written: [Errno 28] No space left on device\n"
    )
    assert list(folder.iterdir()) == []


def test_a_damaged_entry_is_made_anew_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = limited(Counting(lambda number: number), tmp_path, cache_hours=1)
    assert call(made).text == "a 1"
    (entry,) = (tmp_path / "results" / "counting").iterdir()
    whole = entry.read_bytes()
    for number, damaged in enumerate((b"", b"\xff\xfe", whole[:-1], whole[:-1] + b"2", whole + b"\0"), start=2):
        entry.write_bytes(damaged)
        assert [call(made).text, call(made).text] == [f"a {number}"] * 2
    assert capsys.readouterr().err == (
        f"counting: the cache of results {entry.parent} cannot be read: {entry.name} is damaged; it is made anew\n"
    )


def test_a_cache_that_cannot_be_read_costs_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    made = limited(Counting(lambda number: number), file, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 2"]
    first, second = capsys.readouterr().err.splitlines()
    folder = file / "results" / "counting"
    assert first.startswith(f"counting: the cache of results {folder} cannot be read: [Errno 20] Not a directory: ")
    assert second.startswith(f"counting: the cache of results {folder} cannot be written: [Errno 20] Not a directory: ")


def test_a_cache_that_hangs_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    for name in ("_read", "_write"):
        monkeypatch.setattr(limits, name, lambda *arguments: release.wait(30))
    monkeypatch.setattr(limits, "CACHE_SECONDS", 0.05)
    made = limited(Counting(lambda number: number), tmp_path, cache_hours=1)
    assert [call(made).text, call(made).text] == ["a 1", "a 2"]
    release.set()
    folder = tmp_path / "results" / "counting"
    assert capsys.readouterr().err == "".join(
        f"counting: the cache of results {folder} cannot be {done}: takes longer than 0.05 seconds\n"
        for done in ("read", "written")
    )
