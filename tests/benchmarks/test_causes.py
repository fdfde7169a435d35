from collections import Counter

import pytest
from causes import Cause, first_cause, needed_tools
from folders import question, trajectory, turn

from midflight.agent.types import ErrorKind, StopReason
from midflight.tasks.atlas import KINDS, atlas_tasks


def lookups(*later, **named):
    return trajectory(turn(1, "population", "24"), turn(2, "area", "2"), *later, **{"answer": "x", **named})


CASES = [
    (lookups(turn(3, "calculator", "12"), turn(4, "finish"), answer="12"), None),
    (lookups(turn(3, "calculator", "12"), turn(4, "finish")), Cause.GENERATOR_WRONG),
    (lookups(turn(3, "calculator", "12"), turn(4, "area", "2"), stop=StopReason.MAX_TURNS), Cause.NEVER_STOPPED),
    (lookups(turn(3, "calculator", "48"), turn(4, "finish")), Cause.WRONG_VALUE),
    (lookups(turn(3, "finish")), Cause.PLANNER_FINISHED_EARLY),
    (lookups(turn(3, "area", "2")), Cause.PLANNER_WRONG_TOOL),
    (lookups(turn(3, "capital", "Lima")), Cause.PLANNER_WRONG_TOOL),
    (lookups(turn(3, "captial", "none", ErrorKind.UNKNOWN_TOOL)), Cause.PLANNER_WRONG_TOOL),
    (lookups(turn(3, "calculator", "bad", ErrorKind.INVALID_ARGUMENTS)), Cause.EXECUTOR_INVALID_ARGUMENTS),
    (lookups(turn(3, "calculator", "bad", ErrorKind.TOOL_ERROR)), Cause.TOOL_FAILED),
    (lookups(turn(3, "calculator", "slow", ErrorKind.TOOL_TIMEOUT)), Cause.TOOL_FAILED),
    (lookups(turn(3, None, "bad", ErrorKind.INVALID_ACTION)), Cause.PLANNER_NO_ACTION),
    (lookups(stop=StopReason.MAX_TURNS), Cause.OUT_OF_TURNS),
    (lookups(answer=None, stop=StopReason.MAX_SECONDS), Cause.CUT_OFF),
    (trajectory(turn(1, "population", "24", stop=True), answer="x", stop=StopReason.VERIFIED),
     Cause.VERIFIER_STOPPED_EARLY),
    # The first fault counts, also when a later one is worse.
    (trajectory(turn(1, "population", "bad", ErrorKind.TOOL_ERROR), turn(2, "finish"), answer="x"), Cause.TOOL_FAILED),
]  # fmt: skip


@pytest.mark.parametrize(("made", "cause"), CASES)
def test_first_cause(made, cause):
    task = question("d", "density", 3, "12")
    assert first_cause(task, made, needed_tools(task)) is cause


def test_without_knowing_the_tools_none_is_wrong():
    task = question("q", "mine", 1, "12")
    assert needed_tools(task) is None
    assert first_cause(task, trajectory(turn(1, "any", "3"), turn(2, "finish"), answer="x"), None) is (
        Cause.PLANNER_FINISHED_EARLY
    )


def test_every_atlas_kind_has_as_many_tools_as_its_level_says():
    for task in atlas_tasks("train", 10 * len(KINDS), 0):
        needed = needed_tools(task)
        assert needed is not None and needed.total() == task.level
        if task.kind in ("sum", "difference", "ratio", "larger_by"):
            quantity = "area" if "area/" in task.id else "population"
            assert needed == Counter({quantity: 2, "calculator": 1}), task
