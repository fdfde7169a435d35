"""Which turn decided: the value of each turn of a trajectory, as the change in expected reward.

V(state) is the expected reward from a state: the finished turns, with the query and its analysis. It is estimated by
continuations from the state (as VinePPO does, arXiv 2410.01679), or from the members of the group that were in the same
state anyway (as GiGPO groups them, arXiv 2505.10978).

Invariant: each state is estimated once, so the changes of a trajectory add up to its reward less its start's value.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from midflight.agent.types import Query, Trajectory, Turn
from midflight.evaluation.intervals import bootstrap_mean, difference, wilson
from midflight.evaluation.statistics import Estimate
from midflight.seeds import derive
from midflight.store.entries import TrajectoryRecord
from midflight.tasks.base import Task
from midflight.tools.base import ToolResult

CONFIDENCE = 0.95
"""Of a state's interval, and of all changes of a trajectory together."""
_ROUNDING = 1e-9
"""A change nearer to 0 is none."""


class Resumable(Protocol):
    """What continuations need of an agent; `AgentFlow` is one."""

    async def run(
        self,
        query: Query,
        *,
        history: Sequence[Turn],
        analysis: str | None,
        on_difference: Callable[[Turn, ToolResult], None],
    ) -> Trajectory:
        """One trajectory that begins with `history`, and with what its calls left to their tools.

        `on_difference` is told of each call that had to be made again for that and gave another result.
        """
        ...


@dataclass(frozen=True)
class GroupValue:
    """Mean reward of the `n` members of a group that were in one state, the trajectory itself among them."""

    mean: float
    n: int


@dataclass(frozen=True)
class Change:
    """What a turn changed in the expected reward; see `turn_credits` for the interval."""

    mean: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > _ROUNDING or self.high < -_ROUNDING


@dataclass(frozen=True)
class TurnCredit:
    """The value of one turn. A turn's state after it is the next turn's before it."""

    turn: int
    group_before: GroupValue | None
    """None where the engine gave no prompt ids to tell states by."""
    group_after: GroupValue | None
    """Behind the last turn the trajectory's own reward, n = 1."""
    before: Estimate | None = None
    """None without continuations, or where all of them were lost."""
    after: Estimate | None = None
    """Behind the last turn the trajectory's own reward: known, so without width, n = 0."""
    change: Change | None = None
    lost: int = 0
    """Continuations from before the turn that infrastructure failures ended: left out."""
    differing: int = 0
    """Continuations from behind the turn in which its call, made again, gave another result than the recorded one."""

    @property
    def group_change(self) -> float | None:
        if self.group_before is None or self.group_after is None:
            return None
        return self.group_after.mean - self.group_before.mean


@dataclass(frozen=True)
class TrajectoryCredit:
    """The value of every turn of one trajectory."""

    trajectory: int
    """Its id in the store."""
    reward: float
    turns: tuple[TurnCredit, ...]

    @property
    def turning_point(self) -> TurnCredit | None:
        """The turn of the largest change among those whose interval excludes 0, the first of equal ones."""
        decided = [(abs(turn.change.mean), turn) for turn in self.turns if turn.change and turn.change.decided]
        return max(decided, key=lambda pair: pair[0])[1] if decided else None

    @property
    def lost(self) -> int:
        """Continuations that infrastructure failures ended."""
        return sum(turn.lost for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        point = self.turning_point
        turns = [{**asdict(turn), "group_change": turn.group_change} for turn in self.turns]
        return {
            "trajectory": self.trajectory,
            "reward": self.reward,
            "turning_point": None if point is None else point.turn,
            "lost": self.lost,
            "turns": turns,
        }


def counted(record: TrajectoryRecord) -> bool:
    """Whether the trajectory has a reward: infrastructure failures have none, whatever was stored."""
    return record.reward is not None and not record.trajectory.stop_reason.lost


def group_credit(records: Sequence[TrajectoryRecord]) -> dict[int, TrajectoryCredit]:
    """The cheap estimate: the value of a state as the mean reward of the group members that passed through it.

    A group is what one run made of one question in one phase and step, so by one policy. Its members are in the same
    state before a turn where the planner was given the same prompt ids. A member alone in its state (n = 1) has its own
    reward as the value, which says nothing about the turn.

    Returns:
        By trajectory id, each with group estimates alone. Trajectories without a reward are left out.
    """
    members = {record.id: record for record in records if counted(record)}
    passed: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in members.values():
        for turn in record.trajectory.turns:
            passed[_state(record, turn)].append(_reward(record))
    found = {}
    for record in members.values():
        values = [
            _group_value(passed[_state(record, turn)]) if turn.generation.prompt_ids else None
            for turn in record.trajectory.turns
        ]
        values.append(GroupValue(_reward(record), 1))
        turns = tuple(
            TurnCredit(turn.index, before, after)
            for turn, before, after in zip(record.trajectory.turns, values, values[1:], strict=False)
        )
        found[record.id] = TrajectoryCredit(record.id, _reward(record), turns)
    return found


async def monte_carlo_credit(
    flow: Resumable,
    record: TrajectoryRecord,
    *,
    continuations: int = 16,
    score: Callable[[Task, str | None], float],
    seed: int = 0,
    concurrency: int = 64,
    group: Sequence[TrajectoryRecord] = (),
    on_done: Callable[[Trajectory], None] | None = None,
) -> TrajectoryCredit:
    """The value of each turn from continuations of the states between them, all run at once.

    Args:
        flow: the agent at the TRAINING temperature (`building.build_agent(..., training=True)`). A greedy agent goes on
            from a state in one way only, and a value would be one reward, drawn `continuations` times.
        record: a trajectory with turns and a reward.
        continuations: from each state.
        score: reward of an answer's text, None where a continuation has no answer.
        seed: with the number of finished turns and the continuation's it seeds the query (`seeds.derive`).
        concurrency: most continuations at once.
        group: the other members of the trajectory's group, for the group estimates.
        on_done: told of each continuation as it ends.

    Raises:
        ValueError: the trajectory has no turns or no reward, or a bound is below 1.
        Exception: the first that `flow`, `score` or `on_done` raised; the other continuations are cancelled.
    """
    if continuations < 1 or concurrency < 1:
        raise ValueError(f"continuations={continuations}, concurrency={concurrency}: both must be at least 1")
    if not counted(record) or not record.trajectory.turns:
        raise ValueError(f"trajectory {record.id} has no turns or no reward")
    made = record.trajectory
    gate = asyncio.Semaphore(concurrency)

    async def one(done: int, number: int) -> float | None:
        query = replace(made.query, seed=derive(seed, "credit", done, number))
        async with gate:
            trajectory = await flow.run(query, history=made.turns[:done], analysis=made.analysis, on_difference=differs)
        reward = None
        if not trajectory.stop_reason.lost:
            reward = score(record.task, trajectory.answer.text if trajectory.answer else None)
        if on_done is not None:
            on_done(trajectory)
        return reward

    differing: Counter[int] = Counter()

    def differs(turn: Turn, result: ToolResult) -> None:
        differing[turn.index] += 1

    try:
        async with asyncio.TaskGroup() as running:
            jobs = [
                [running.create_task(one(done, number)) for number in range(continuations)]
                for done in range(len(made.turns))
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    cheap = group_credit([*group, record])[record.id]
    return turn_credits(cheap, [[job.result() for job in state] for state in jobs], differing)


def turn_credits(
    cheap: TrajectoryCredit,
    states: Sequence[Sequence[float | None]],
    differing: Mapping[int, int] = MappingProxyType({}),
) -> TrajectoryCredit:
    """`cheap` with the values that continuations give.

    The interval of a state is Wilson's at 95 %. That of a change is Newcombe's for the difference of two independent
    proportions, at 1 - 0.05 / T for T turns: by Bonferroni's inequality all T hold together at 95 %, so the largest of
    many changes is not taken for a turning point by chance. Behind the last turn the value is known. Where a reward is
    outside [0, 1], percentile bootstrap intervals stand in Wilson's place, in the same formula for the difference.

    Args:
        cheap: the trajectory's group estimates.
        states: the rewards of the continuations from before each turn; None for one lost to infrastructure.
        differing: by turn, continuations in which its call gave another result than the recorded one.
    """
    rewards = [[reward for reward in state if reward is not None] for state in states]
    proportions = all(0.0 <= reward <= 1.0 for state in rewards for reward in (*state, cheap.reward))

    def estimates(confidence: float) -> list[Estimate | None]:
        known = Estimate(cheap.reward, cheap.reward, cheap.reward, 0)
        return [_estimate(state, proportions, confidence) for state in rewards] + [known]

    values = estimates(CONFIDENCE)
    wider = estimates(1.0 - (1.0 - CONFIDENCE) / len(states))
    turns = [
        replace(
            turn,
            before=values[place],
            after=values[place + 1],
            change=_change(wider[place], wider[place + 1]),
            lost=len(states[place]) - len(rewards[place]),
            differing=differing.get(turn.turn, 0),
        )
        for place, turn in enumerate(cheap.turns)
    ]
    return replace(cheap, turns=tuple(turns))


def _estimate(rewards: Sequence[float], proportions: bool, confidence: float) -> Estimate | None:
    if not rewards:
        return None
    mean = math.fsum(rewards) / len(rewards)
    if proportions:
        return Estimate(mean, *wilson(mean, len(rewards), confidence=confidence), len(rewards))
    return Estimate(mean, *bootstrap_mean(rewards, confidence=confidence), len(rewards))


def _change(before: Estimate | None, after: Estimate | None) -> Change | None:
    if before is None or after is None:
        return None
    low, high = difference((after.mean, after.low, after.high), (before.mean, before.low, before.high))
    return Change(after.mean - before.mean, low, high)


def _state(record: TrajectoryRecord, turn: Turn) -> tuple[Any, ...]:
    """What tells the state before a turn from all others; the prompt ids hold query, analysis and memory."""
    return record.run_id, record.phase, record.step, record.group, turn.index, turn.generation.prompt_ids


def _reward(record: TrajectoryRecord) -> float:
    assert record.reward is not None, "counted lets no other through"
    return record.reward


def _group_value(rewards: Sequence[float]) -> GroupValue:
    return GroupValue(math.fsum(rewards) / len(rewards), len(rewards))
