"""What a step's trajectories say: rewards, turns, tools and errors, as one flat record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from midflight.agent.types import StopReason
from midflight.evaluation.statistics import error_rates, infrastructure_reasons, tool_error_rate, tool_shares
from midflight.training.advantages import Placed, carries
from midflight.training.rollouts import Group


def step_record(step: int, groups: Sequence[Group], placed: Sequence[Placed]) -> dict[str, Any]:
    """The part of a metrics record that comes from the rollouts; `placed` are the groups' advantages."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "step": step,
        "reward": _mean(reward for group in groups for _, reward in group.scored),
        "reward_by_kind": _means((group.task.kind, reward) for group in groups for _, reward in group.scored),
        "success_by_level": _means((str(group.task.level), reward) for group in groups for _, reward in group.scored),
        "groups": len(groups),
        "groups_with_signal": sum(carries(group) for group in placed),
        "groups_all_right": sum(bool(group.scored) and min(r for _, r in group.scored) == 1 for group in groups),
        "trajectories": len(trajectories),
        "infrastructure": sum(one.stop_reason is StopReason.INFRASTRUCTURE for one in trajectories),
        "infrastructure_reasons": infrastructure_reasons(trajectories),
        "stragglers": sum(one.stop_reason is StopReason.CANCELLED for one in trajectories),
        "turns": len(turns) / max(len(trajectories), 1),
        "tool_shares": tool_shares(turns),
        "errors": error_rates(turns),
        "tool_error_rate": tool_error_rate(turns),
        "stop_reasons": dict(Counter(one.stop_reason.value for one in trajectories)),
    }


def _mean(values: Iterable[float]) -> float | None:
    """None where nothing was scored, which is no reward of 0."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _means(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    grouped: dict[str, list[float]] = {}
    for key, value in pairs:
        grouped.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in sorted(grouped.items())}
