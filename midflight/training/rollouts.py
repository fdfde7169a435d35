"""Rollouts: groups of trajectories from the live agent, and the rows they train.

Invariant: a trajectory ended by infrastructure is counted and left out of its group; it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midflight.agent.flow import AgentFlow
from midflight.agent.types import Query, StopReason, Trajectory
from midflight.seeds import derive
from midflight.tasks.base import Task
from midflight.training.advantages import flow_grpo, has_signal, turn_normalised
from midflight.training.packing import Row

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

    @property
    def signal(self) -> bool:
        return has_signal([reward for _, reward in self.scored])


async def collect(
    flow: AgentFlow,
    tasks: Sequence[Task],
    group_size: int,
    score: Score,
    seed: int,
    on_done: Callable[[Task, int, Trajectory, float | None], None] | None = None,
) -> list[Group]:
    """Run `group_size` trajectories of each task, all concurrently, and score them.

    `on_done` sees each trajectory as it ends: task, member, trajectory, reward.
    """

    async def one(index: int, task: Task, member: int) -> tuple[Trajectory, float | None]:
        query = Query(text=task.question, id=task.id, seed=derive(seed, index, task.id, member))
        trajectory = await flow.run(query)
        reward = None
        if trajectory.stop_reason is not StopReason.INFRASTRUCTURE:
            reward = score(task, trajectory.answer.text if trajectory.answer else None)
        if on_done is not None:
            on_done(task, member, trajectory, reward)
        return trajectory, reward

    async with asyncio.TaskGroup() as running:
        jobs = [
            [running.create_task(one(index, task, member)) for member in range(group_size)]
            for index, task in enumerate(tasks)
        ]
    groups = []
    for task, members in zip(tasks, jobs, strict=True):
        trajectories, rewards = zip(*(job.result() for job in members), strict=True)
        groups.append(Group(task, trajectories, rewards))
    return groups


def advantages(group: Group, estimator: str) -> list[float]:
    """One advantage for each scored trajectory of the group, in order."""
    rewards = [reward for _, reward in group.scored]
    if estimator == "turn_normalised":
        return turn_normalised(rewards, [len(trajectory.turns) for trajectory, _ in group.scored])
    return flow_grpo(rewards)


def rows_of(groups: Sequence[Group], estimator: str) -> list[Row]:
    """The rows of the groups with signal: one a planner turn, each unforced token weighing 1 / (groups G T_i |a|)."""
    live = [group for group in groups if group.signal]
    rows = []
    for group in live:
        for (trajectory, _), advantage in zip(group.scored, advantages(group, estimator), strict=True):
            for turn in trajectory.turns:
                drawn = turn.generation
                free = len(drawn.forced) - sum(drawn.forced)
                if free == 0:
                    continue
                rows.append(
                    Row(
                        prompt_ids=drawn.prompt_ids,
                        ids=drawn.ids,
                        logprobs=drawn.logprobs,
                        forced=drawn.forced,
                        temperature=drawn.sampling.temperature,
                        grammar=drawn.grammar,
                        advantage=advantage,
                        weight=1.0 / (len(live) * len(group.scored) * len(trajectory.turns) * free),
                    )
                )
    return rows
