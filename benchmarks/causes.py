"""Why a trajectory's answer is wrong: the first cause, as a pure function of task and trajectory.

A result that is right by itself clears what came before it: then the fault lies in not answering with it. Otherwise the
first fault in the order of the turns is the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from midflight.agent.types import ErrorKind, StopReason, Trajectory, Turn
from midflight.rewards import score
from midflight.tasks.base import Task
from midflight.tools.base import FINISH


class Cause(StrEnum):
    """What lost the question."""

    PLANNER_NO_ACTION = "planner_no_action"
    """The planner's text was not an action."""
    PLANNER_WRONG_TOOL = "planner_wrong_tool"
    """It chose a tool that the question does not need, or one more often than needed, or one that does not exist."""
    PLANNER_FINISHED_EARLY = "planner_finished_early"
    """It chose `finish` before the tools that the question needs had been called."""
    EXECUTOR_INVALID_ARGUMENTS = "executor_invalid_arguments"
    """The arguments broke the tool's schema."""
    TOOL_FAILED = "tool_failed"
    """The arguments were valid, and the tool failed, found nothing, or ran out of time."""
    WRONG_VALUE = "wrong_value"
    """All needed tools were called and none failed, but no result is the answer: a wrong country or expression."""
    VERIFIER_STOPPED_EARLY = "verifier_stopped_early"
    """The verifier stopped before the tools that the question needs had been called."""
    NEVER_STOPPED = "never_stopped"
    """A result was right, and the agent went on past it."""
    GENERATOR_WRONG = "generator_wrong"
    """The last successful result was right, and the answer is not."""
    OUT_OF_TURNS = "out_of_turns"
    """None of the above before the turns were spent."""
    CUT_OFF = "cut_off"
    """Time, context, cancellation or infrastructure ended it before an answer."""


_ANSWERED = (StopReason.FINISHED, StopReason.VERIFIED, StopReason.MAX_TURNS)


def needed_tools(task: Task) -> Counter[str] | None:
    """How often an atlas question needs each tool; None for a kind of another family."""
    quantity = "area" if "area" in task.question else "population"
    pair = Counter({quantity: 2, "calculator": 1})
    needed: Mapping[str, Counter[str]] = {
        "capital": Counter(["capital"]),
        "population": Counter(["population"]),
        "area": Counter(["area"]),
        "country_of_capital": Counter(["country_of_capital"]),
        "arithmetic": Counter(["calculator"]),
        "population_of_capital": Counter(["country_of_capital", "population"]),
        "area_of_capital": Counter(["country_of_capital", "area"]),
        "density": Counter(["population", "area", "calculator"]),
        "sum": pair,
        "difference": pair,
        "ratio": pair,
        "larger_by": pair,
    }
    return needed.get(task.kind)


def first_cause(task: Task, trajectory: Trajectory, needed: Counter[str] | None) -> Cause | None:
    """The cause of a wrong answer, None where the answer is right.

    Args:
        task: the question, with its checker.
        trajectory: what the agent did.
        needed: how often each tool is needed (`needed_tools`); None leaves out what rests on it: no tool is wrong, and
            any stop without a right result is early.
    """
    if score(task, None if trajectory.answer is None else trajectory.answer.text) == 1.0:
        return None
    if trajectory.stop_reason not in _ANSWERED:
        return Cause.CUT_OFF
    results = [
        turn for turn in trajectory.turns if turn.result.error is None and turn.call and turn.call.tool != FINISH
    ]
    right = [turn for turn in results if score(task, turn.result.text) == 1.0]
    if right:
        return Cause.GENERATOR_WRONG if right[-1] is results[-1] else Cause.NEVER_STOPPED
    left = None if needed is None else Counter(needed)
    for turn in trajectory.turns:
        cause = _fault(turn, left)
        if cause is not None:
            return cause
    return Cause.WRONG_VALUE if left is not None and not +left else Cause.OUT_OF_TURNS


def _fault(turn: Turn, left: Counter[str] | None) -> Cause | None:
    """What is wrong with one turn; takes the tool it called off `left`."""
    if turn.action is None:
        return Cause.PLANNER_NO_ACTION
    tool, missing = turn.action.tool, left is None or bool(+left)
    if tool == FINISH:
        return Cause.PLANNER_FINISHED_EARLY if missing else Cause.WRONG_VALUE
    if turn.result.error is ErrorKind.UNKNOWN_TOOL:
        return Cause.PLANNER_WRONG_TOOL
    if left is not None and left[tool] <= 0:
        return Cause.PLANNER_WRONG_TOOL if missing else Cause.WRONG_VALUE
    if turn.result.error is ErrorKind.INVALID_ARGUMENTS:
        return Cause.EXECUTOR_INVALID_ARGUMENTS
    if turn.result.error is not None:
        return Cause.TOOL_FAILED
    if left is not None:
        left[tool] -= 1
        missing = bool(+left)
    if turn.verdict.stop:
        return Cause.VERIFIER_STOPPED_EARLY if missing else Cause.WRONG_VALUE
    return None
