"""Runs an agent over questions, a bounded number at a time.

Invariant: the result is in the order of the tasks and holds every one of them, whatever finished first or failed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from midflight import looping
from midflight.agent.types import Query, Trajectory
from midflight.evaluation.statistics import Scored
from midflight.seeds import derive
from midflight.tasks.base import Task


class Runnable(Protocol):
    """What an evaluation needs of an agent; `AgentFlow` is one."""

    async def run(self, query: Query) -> Trajectory:
        """One trajectory."""
        ...


async def evaluate(
    flow: Runnable,
    tasks: Sequence[Task],
    *,
    trials: int = 1,
    concurrency: int = 64,
    seed: int = 0,
    score: Callable[[Task, str | None], float],
    on_done: Callable[[Scored], None] | None = None,
) -> list[Scored]:
    """Run every task `trials` times and score each answer.

    Args:
        flow: the agent.
        tasks: questions with distinct ids.
        trials: passes over the questions.
        concurrency: most trajectories at once.
        seed: with the task's id and the trial's number it seeds the query (`seeds.derive`).
        score: reward in [0, 1] of an answer's text, None where the trajectory has no answer. Not asked about
            infrastructure failures: they count 0.
        on_done: told of each trajectory as it finishes, in that order.

    Returns:
        Task by task, the trials of a task next to each other.

    Raises:
        ValueError: two tasks share an id (answers would be compared with another question's), or a bound is below 1.
        Exception: the first that `flow`, `score` or `on_done` raised; the other trajectories are cancelled.
    """
    repeated = [task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise ValueError(f"task id {repeated[0]!r} is used more than once; give every task its own")
    if trials < 1 or concurrency < 1:
        raise ValueError(f"trials={trials}, concurrency={concurrency}: both must be at least 1")
    jobs = [(task, trial) for task in tasks for trial in range(trials)]
    done: dict[int, Scored] = {}
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for place, (task, trial) in waiting:
            trajectory = await flow.run(Query(task.question, task.id, derive(seed, task.id, trial)))
            done[place] = scored = _scored(task, trajectory, score)
            if on_done is not None:
                on_done(scored)

    try:
        async with asyncio.TaskGroup() as group:
            await looping.start(group, (work() for _ in range(min(concurrency, len(jobs)))))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [done[place] for place in range(len(jobs))]


def _scored(task: Task, trajectory: Trajectory, score: Callable[[Task, str | None], float]) -> Scored:
    if trajectory.stop_reason.lost:
        return Scored(task, trajectory, 0.0)
    return Scored(task, trajectory, score(task, None if trajectory.answer is None else trajectory.answer.text))
