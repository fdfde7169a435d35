"""What a store takes and gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midflight.agent.types import Trajectory
from midflight.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class NewTrajectory:
    """A trajectory to write, with its place in the run."""

    phase: str
    """What it was made for: `train`, `before`, `after`, `interrupted` (of a step stopped in its rollouts), or, where a
    supervised run keeps what it learns from, `demonstration`."""
    step: int | None
    """Training step; None outside training."""
    group: str
    """Names the group; its members share it."""
    member: int
    """Place in the group, from 0."""
    task: Task
    trajectory: Trajectory
    reward: float | None = None
    """None where nothing was scored (infrastructure failures in training)."""
    advantage: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrajectoryRecord(NewTrajectory):
    """A trajectory as the store gives it back."""

    id: int
    run_id: int


@dataclass(frozen=True)
class TrajectoryLine:
    """What a list says of a trajectory."""

    id: int
    phase: str
    step: int | None
    group: str
    question: str
    turns: int
    stop_reason: str
    reward: float | None


@dataclass(frozen=True)
class PhaseLine:
    """The trajectories of one phase: between which ids, and of which training steps."""

    phase: str
    first_id: int
    last_id: int
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    id: int
    name: str
    seed: int
    recipe: dict[str, Any]
    created_at: str
    """UTC, `YYYY-MM-DD HH:MM:SS`."""
