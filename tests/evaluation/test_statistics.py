import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from midflight.agent.types import ErrorKind, Query, StopReason
from midflight.evaluation import Estimate, EvaluationResult, Scored, bootstrap_mean, summarise
from midflight.evaluation.statistics import infrastructure_reasons
from tests.agent.doubles import compact_flow
from tests.evaluation.build import scored, task, turn

MIXED = [
    scored(task("a"), 1.0, turn(1, "capital", "Ghana"), turn(2, "finish")),
    scored(task("b"), 0.0, turn(1, "capital", "Gana", error=ErrorKind.TOOL_ERROR), turn(2, "finish")),
    scored(
        task("c", "sum", 3),
        1.0,
        turn(1, "population"),
        turn(2, "population"),
        turn(3, "calculator"),
        turn(4, "finish"),
    ),
    scored(
        task("d", "sum", 3),
        0.0,
        turn(1, None, error=ErrorKind.INVALID_ACTION),
        turn(2, "teleport", error=ErrorKind.UNKNOWN_TOOL),
        stop=StopReason.MAX_TURNS,
    ),
    scored(task("e", "more", 4), 1.0, stop=StopReason.INFRASTRUCTURE),
]


def test_every_question_counts_and_an_infrastructure_failure_is_wrong() -> None:
    result = summarise(MIXED, resamples=300, seed=3)
    assert (result.n, result.questions, result.infrastructure) == (5, 5, 1)
    assert result.accuracy.mean == 2 / 5
    low, high = bootstrap_mean([1.0, 0.0, 1.0, 0.0, 0.0], resamples=300, seed=3)
    assert result.accuracy == Estimate(0.4, low, high, 5)
    assert {kind: (found.mean, found.n) for kind, found in result.by_kind.items()} == {
        "capital": (0.5, 2),
        "sum": (0.5, 2),
        "more": (0.0, 1),
    }
    assert list(result.by_kind) == ["capital", "sum", "more"]
    assert {level: (found.mean, found.n) for level, found in result.by_level.items()} == {
        1: (0.5, 2),
        3: (0.5, 2),
        4: (0.0, 1),
    }
    assert result.three_or_more is not None
    assert (result.three_or_more.mean, result.three_or_more.n) == (1 / 3, 3)


def test_turns_tools_errors_and_stops() -> None:
    result = summarise(MIXED)
    assert result.mean_turns == 10 / 5
    assert result.tool_shares == {
        "(unknown)": 1 / 9,
        "calculator": 1 / 9,
        "capital": 2 / 9,
        "finish": 3 / 9,
        "population": 2 / 9,
    }
    assert result.tool_error_rate == 2 / 6  # text that is no action, and finish, are no calls
    assert result.errors == {
        "invalid_action": 0.1,
        "unknown_tool": 0.1,
        "invalid_arguments": 0.0,
        "tool_error": 0.1,
        "tool_timeout": 0.0,
        "call_limit": 0.0,
    }
    assert result.stop_reasons == {"finished": 3, "max_turns": 1, "infrastructure": 1}


def test_why_trajectories_were_lost_is_one_line_each_however_often_tried() -> None:
    def lost(error: str, stop: StopReason = StopReason.INFRASTRUCTURE) -> Scored:
        item = scored(task("a"), 0.0, stop=stop)
        return replace(item, trajectory=replace(item.trajectory, error=error))

    down = [lost(f"s: no\n\x1b ({number} attempts in {number}.5 s)") for number in range(2)]
    many = [lost(f"s: HTTP {status}") for status in (401, 402, 403, 403, 403)]
    silent = [lost(""), lost("spent", StopReason.BUDGET), lost("too long", StopReason.CONTEXT_OVERFLOW)]
    result = summarise([*down, lost("s: no \x1b (0 attempts in 12 s)"), *many, *silent])
    assert (result.infrastructure, result.n) == (9, 11)
    assert list(result.infrastructure_reasons.items()) == [
        ("s: no ? (0 attempts in 0.5 s)", 3),
        ("s: HTTP 403", 3),
        ("s: HTTP 401", 1),
    ]
    assert result.budget_spent == "spent" and summarise(down).budget_spent == ""
    assert infrastructure_reasons([lost("x" * 400).trajectory]) == {"x" * 297 + "...": 1}


def test_nothing_is_scored_where_all_are_lost() -> None:
    gone, spent = (scored(task("a"), 0.0, stop=stop) for stop in (StopReason.INFRASTRUCTURE, StopReason.BUDGET))
    assert all(summarise(items).nothing_scored for items in ([gone], [gone, spent], [spent]))
    assert not any(summarise(items).nothing_scored for items in ([*MIXED, gone], MIXED[:1]))


def test_a_call_that_was_refused_for_its_limit_is_an_error_of_its_kind() -> None:
    flow, _ = compact_flow(["population: Peru", "population: Chad", "finish"], max_calls=1)
    made = asyncio.run(flow.run(Query("?")))
    result = summarise([Scored(task("a"), made, 1.0)])
    assert result.tool_error_rate == 1 / 2
    assert {kind: share for kind, share in result.errors.items() if share} == {"call_limit": 1 / 3}


def test_a_result_comes_back_equal_from_its_file(tmp_path: Path) -> None:
    for name, items in (("all", MIXED), ("easy", MIXED[:2])):
        result = summarise(items)
        result.save(tmp_path / name)
        assert EvaluationResult.load(tmp_path / name) == result
    record = summarise(MIXED).to_json()
    del record["infrastructure_reasons"], record["budget_spent"]  # as earlier versions wrote it
    assert EvaluationResult.from_json(record) == summarise(MIXED)
    assert summarise(MIXED[:2]).three_or_more is None


def test_no_turns_at_all_and_no_questions() -> None:
    result = summarise([MIXED[4]])
    assert (result.mean_turns, result.tool_error_rate, result.tool_shares) == (0.0, 0.0, {})
    with pytest.raises(ValueError, match="no scored trajectories"):
        summarise([])
