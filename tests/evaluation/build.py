"""Trajectories and tasks for the tests, from as little as each test says."""

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
from midflight.evaluation import Scored
from midflight.tasks.base import Task


def task(task_id: str, kind: str = "capital", level: int = 1, answer: str = "Accra") -> Task:
    return Task(task_id, f"Question {task_id}?", answer, kind=kind, level=level)


def turn(index: int, tool: str | None, context: str = "", result: str = "", error: ErrorKind | None = None) -> Turn:
    """`tool` None is text that is no action."""
    action = None if tool is None else Action("", tool, context)
    call = None if tool is None or error is not None else ToolCall(tool, {"text": context} if context else {})
    generation = Generation(f"{tool}: {context}", FinishReason.STOP)
    return Turn(index, generation, action, call, ToolResult(result, error), Verdict(False))


def trajectory(
    *turns: Turn, answer: str | None = "Accra", stop: StopReason = StopReason.FINISHED, question: str = "Question?"
) -> Trajectory:
    return Trajectory(Query(question), turns, stop, None if answer is None else Answer(answer))


def scored(of: Task, reward: float, *turns: Turn, stop: StopReason = StopReason.FINISHED) -> Scored:
    return Scored(of, trajectory(*turns, stop=stop, question=of.question), reward)
