"""Runs with a store of trajectories that somebody else made: no token ids, as an engine behind an API leaves them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from midflight.agent.types import (
    Action,
    Answer,
    ErrorKind,
    Generation,
    Query,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from midflight.engines.base import FinishReason
from midflight.store import NewTrajectory, RunFolder, Store
from midflight.tasks.base import Task
from midflight.tools.base import FINISH

AGENT = {"agent": {"executor": {"kind": "direct"}, "grounded": False}}


def turn(index: int, said: Action | str, result: str = "") -> Turn:
    """`said` is the action, or a text that is none; a call's result is its context unless given."""
    if isinstance(said, str):
        error = ToolResult("expected an action", ErrorKind.INVALID_ACTION)
        return Turn(index, Generation(said, FinishReason.STOP), None, None, error, Verdict(stop=False))
    generation = Generation(f"{said.tool}: {said.context}", FinishReason.STOP)
    call = ToolCall(said.tool, {} if said.tool == FINISH else {"letter": said.context})
    text = "" if said.tool == FINISH else result or said.context
    return Turn(index, generation, said, call, ToolResult(text), Verdict(stop=False))


def trajectory(question: str, *said: Action | str, analysis: str = "") -> Trajectory:
    turns = tuple(turn(index, one) for index, one in enumerate(said, 1))
    return Trajectory(Query(question, question), turns, StopReason.FINISHED, Answer("x"), analysis)


def act(tool: str, context: str = "", sub_goal: str = "") -> Action:
    return Action(sub_goal, tool, context)


def entry(
    question: str, *said: Action | str, reward: float | None = 1.0, phase: str = "train", **settings: Any
) -> NewTrajectory:
    made = trajectory(question, *said, **settings)
    return NewTrajectory(
        phase=phase, step=None, group=question, member=0, task=Task(question, question, "x"), trajectory=made,
        reward=reward,
    )  # fmt: skip


def record_run(folder: Path, entries: Iterable[NewTrajectory], recipe: dict[str, Any] | None = None) -> Path:
    """A run folder that holds the trajectories, and no more."""
    with Store(RunFolder(folder).create().store) as store:
        store.add_trajectories(store.start_run("teacher", recipe or AGENT, 0), entries)
    return folder
