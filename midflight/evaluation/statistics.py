"""What an evaluation found, from its scored trajectories.

Invariant: every question counts. An infrastructure failure is a wrong answer here, in every denominator, and is also
counted by itself, so that a number with failures in it is seen to have them. Where nothing else is left, there is no
number (`EvaluationResult.nothing_scored`).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from midflight.agent.types import ErrorKind, StopReason, Trajectory, Turn
from midflight.errors import reading
from midflight.evaluation.intervals import bootstrap_mean
from midflight.rendering import plain
from midflight.tasks.base import Task
from midflight.tools.base import FINISH

UNKNOWN_TOOL = "(unknown)"
"""All actions that name no tool of the toolset, in `tool_shares`."""
MOST_REASONS = 3
"""Reasons for infrastructure failures that are kept, the most frequent ones."""
_TRIED = re.compile(r"\d+ attempts|\d+(\.\d+)? s\b")


@dataclass(frozen=True)
class Scored:
    """One question, what the agent did, and the reward in [0, 1]."""

    task: Task
    trajectory: Trajectory
    reward: float

    @property
    def earned(self) -> float | None:
        """The reward, None where infrastructure or a budget ended the trajectory: accuracies count that as 0."""
        return None if self.trajectory.stop_reason.lost else self.reward


@dataclass(frozen=True)
class Estimate:
    """A mean reward over `n` trajectories with its interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of one evaluation. Shares and rates are of 1."""

    n: int
    """Trajectories: questions times trials."""
    questions: int
    accuracy: Estimate
    by_kind: dict[str, Estimate]
    """In the order of level, then name."""
    level_of_kind: dict[str, int]
    """The hardest level among the kind's questions."""
    by_level: dict[int, Estimate]
    three_or_more: Estimate | None
    """Questions of level 3 and above; None where there are none."""
    tool_shares: dict[str, float]
    """Share of each tool among all actions, `finish` included; text that is no action is not one."""
    tool_error_rate: float
    """See `tool_error_rate`."""
    errors: dict[str, float]
    """Turns that ended in each kind of error, over all turns; every kind is there."""
    mean_turns: float
    stop_reasons: dict[str, int]
    infrastructure: int
    """Trajectories lost to an engine, judge or sandbox: counted wrong above."""
    infrastructure_reasons: dict[str, int] = field(default_factory=dict)
    """See `infrastructure_reasons`."""
    budget_spent: str = ""
    """See `budget_spent`."""

    @property
    def nothing_scored(self) -> bool:
        """See `nothing_scored`: accuracies are then of no answer at all, and no result."""
        return nothing_scored(self.stop_reasons)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives back an equal result."""
        return {**asdict(self), "by_level": {str(level): asdict(found) for level, found in self.by_level.items()}}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> EvaluationResult:
        """Raises KeyError or TypeError where `record` is not one that `to_json` made."""
        three = record["three_or_more"]
        return cls(
            **{
                **record,
                "accuracy": Estimate(**record["accuracy"]),
                "by_kind": {kind: Estimate(**found) for kind, found in record["by_kind"].items()},
                "by_level": {int(level): Estimate(**found) for level, found in record["by_level"].items()},
                "three_or_more": None if three is None else Estimate(**three),
            }
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON, in one move."""
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> EvaluationResult:
        """Read what `save` wrote.

        Raises:
            UserError: the file holds something else.
        """
        with reading(Path(path), "remove it: it is then made again by --resume"):
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def summarise(scored: Sequence[Scored], *, resamples: int = 2000, seed: int = 0) -> EvaluationResult:
    """The figures of `scored`; trials of one question (same task id) are drawn together in the bootstrap.

    Raises:
        ValueError: `scored` is empty.
    """
    if not scored:
        raise ValueError("no scored trajectories: an evaluation needs at least one question")

    def estimate(members: Sequence[Scored]) -> Estimate:
        rewards = [counted_reward(item) for item in members]
        clusters = [item.task.id for item in members]
        low, high = bootstrap_mean(rewards, clusters=clusters, resamples=resamples, seed=seed)
        return Estimate(sum(rewards) / len(rewards), low, high, len(rewards))

    level_of_kind: dict[str, int] = {}
    for item in scored:
        level_of_kind[item.task.kind] = max(item.task.level, level_of_kind.get(item.task.kind, item.task.level))
    level_of_kind = dict(sorted(level_of_kind.items(), key=lambda pair: (pair[1], pair[0])))
    of_kind: dict[str, list[Scored]] = {kind: [] for kind in level_of_kind}
    of_level: dict[int, list[Scored]] = {level: [] for level in sorted({item.task.level for item in scored})}
    for item in scored:
        of_kind[item.task.kind].append(item)
        of_level[item.task.level].append(item)
    hard = [item for item in scored if item.task.level >= 3]
    turns = [turn for item in scored for turn in item.trajectory.turns]
    stops = Counter(item.trajectory.stop_reason for item in scored)
    return EvaluationResult(
        n=len(scored),
        questions=len({item.task.id for item in scored}),
        accuracy=estimate(scored),
        by_kind={kind: estimate(members) for kind, members in of_kind.items()},
        level_of_kind=level_of_kind,
        by_level={level: estimate(members) for level, members in of_level.items()},
        three_or_more=estimate(hard) if hard else None,
        tool_shares=tool_shares(turns),
        tool_error_rate=tool_error_rate(turns),
        errors=error_rates(turns),
        mean_turns=len(turns) / len(scored),
        stop_reasons={reason.value: stops[reason] for reason in StopReason if stops[reason]},
        infrastructure=stops[StopReason.INFRASTRUCTURE],
        infrastructure_reasons=infrastructure_reasons(item.trajectory for item in scored),
        budget_spent=budget_spent(item.trajectory for item in scored),
    )


def counted_reward(item: Scored) -> float:
    """The reward as evaluation counts it: 0 for an infrastructure failure and the like, whatever was scored."""
    return 0.0 if item.trajectory.stop_reason.lost else item.reward


def nothing_scored(stops: Collection[str]) -> bool:
    """Whether trajectories that ended for these reasons were all lost, to whatever."""
    return len(stops) > 0 and all(StopReason(stop).lost for stop in stops)


def lost_to_infrastructure(stops: Collection[str]) -> bool:
    """Whether they were all lost, any of them to an infrastructure failure."""
    return StopReason.INFRASTRUCTURE in stops and nothing_scored(stops)


def budget_spent(trajectories: Iterable[Trajectory]) -> str:
    """The budget that ended trajectories, with its key and what was used when it ended the first; empty: none did."""
    ended = (one.error or "" for one in trajectories if one.stop_reason is StopReason.BUDGET)
    return next(ended, "")


def infrastructure_reasons(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Why trajectories were lost to infrastructure failures, one line each, and how many, the most frequent first.

    Reasons that differ in attempts and seconds alone are one. At most MOST_REASONS.
    """
    found: Counter[str] = Counter()
    first: dict[str, str] = {}
    for one in trajectories:
        if one.stop_reason is StopReason.INFRASTRUCTURE and one.error:
            reason = plain(one.error)
            found[first.setdefault(_TRIED.sub("", reason), reason)] += 1
    return dict(found.most_common(MOST_REASONS))


def tool_shares(turns: Iterable[Turn]) -> dict[str, float]:
    """Share of each tool among the actions of `turns`, by name; unknown tools are one entry."""
    chosen: Counter[str] = Counter()
    for turn in turns:
        if turn.action is not None:
            chosen[UNKNOWN_TOOL if turn.result.error is ErrorKind.UNKNOWN_TOOL else turn.action.tool] += 1
    total = chosen.total()
    return {tool: chosen[tool] / total for tool in sorted(chosen)}


def tool_error_rate(turns: Sequence[Turn]) -> float:
    """Calls that ended in an error kind, over all calls (0 where there are none).

    A call is a turn that names a tool other than `finish`, whether or not there is such a tool.
    """
    failed = [turn.result.error is not None for turn in turns if turn.action and turn.action.tool != FINISH]
    return sum(failed) / len(failed) if failed else 0.0


def error_rates(turns: Sequence[Turn]) -> dict[str, float]:
    """Turns that ended in each kind of error, over all turns (all 0 where there are none)."""
    found = Counter(turn.result.error for turn in turns)
    return {kind.value: found[kind] / len(turns) if turns else 0.0 for kind in ErrorKind}
