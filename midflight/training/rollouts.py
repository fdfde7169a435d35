"""Rollouts: groups of trajectories from the live agent.

Invariant: a lost trajectory (`StopReason.lost`) is counted and left out of its group; it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midflight import looping
from midflight.agent.flow import AgentFlow
from midflight.agent.types import Query, StopReason, Trajectory
from midflight.errors import TrainingStopped
from midflight.evaluation.statistics import infrastructure_reasons, lost_to_infrastructure
from midflight.recipe.resuming import going_on
from midflight.rendering import losses
from midflight.seeds import derive
from midflight.store import RunFolder
from midflight.tasks.base import Task

Score = Callable[[Task, str | None], float]


@dataclass(frozen=True)
class Group:
    """The G trajectories of one question, with the reward of each (None where infrastructure failed)."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float | None, ...]

    @property
    def scored(self) -> list[tuple[Trajectory, float]]:
        """The trajectories that count, with their rewards."""
        return [
            (trajectory, reward)
            for trajectory, reward in zip(self.trajectories, self.rewards, strict=True)
            if reward is not None
        ]


async def collect(
    flow: AgentFlow,
    tasks: Sequence[Task],
    group_size: int,
    score: Score,
    seed: int,
    on_done: Callable[[Task, int, Trajectory, float | None], None] | None = None,
    cancel: asyncio.Event | None = None,
) -> list[Group]:
    """Run `group_size` trajectories of each task, all concurrently, and score them.

    `on_done` sees each trajectory as it ends: task, member, trajectory, reward. Setting `cancel` ends those that still
    run: they are CANCELLED and have no reward.
    """

    async def one(index: int, task: Task, member: int) -> tuple[Trajectory, float | None]:
        query = Query(text=task.question, id=task.id, seed=derive(seed, index, task.id, member))
        trajectory = await flow.run(query, cancel=cancel)
        reward = None
        if not trajectory.stop_reason.lost:
            reward = score(task, trajectory.answer.text if trajectory.answer else None)
        if on_done is not None:
            on_done(task, member, trajectory, reward)
        return trajectory, reward

    async with asyncio.TaskGroup() as running:
        places = [(index, task, member) for index, task in enumerate(tasks) for member in range(group_size)]
        jobs = await looping.start(running, (one(*place) for place in places))
    groups = []
    for index, task in enumerate(tasks):
        members = jobs[index * group_size : (index + 1) * group_size]
        trajectories, rewards = zip(*(job.result() for job in members), strict=True)
        groups.append(Group(task, trajectories, rewards))
    return groups


def check_lost(what: str, trajectories: Sequence[Trajectory], run: RunFolder) -> None:
    """Let no more be made of these trajectories where the budget ended one, or all were lost.

    Trajectories that only the time limit of a step cut off stop nothing; where infrastructure failures took all others,
    they do not count.

    Raises:
        TrainingStopped: `what` is where, such as `step 3`.
    """
    for one in trajectories:
        if one.stop_reason is StopReason.BUDGET:
            key = one.error.partition(" = ")[0]
            raise TrainingStopped(f"{what}: {one.error}; go on with a larger one: {going_on(run.path, f'{key}=...')}")
    stops = Counter(one.stop_reason for one in trajectories)
    if lost_to_infrastructure(stops):
        lost = losses(stops[StopReason.INFRASTRUCTURE], len(trajectories), infrastructure_reasons(trajectories))
        raise TrainingStopped(f"{what}: {lost}; go on with: {going_on(run.path)}")
