"""From groups of trajectories to what an estimator sees, and to weighted rows.

Invariant: rewards, shaping costs and penalties are settled before any row is left out, so what a trajectory adds to its
group's mean does not depend on whether it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from midflight.agent.types import ErrorKind, StopReason, Trajectory, Turn
from midflight.engines.base import FinishReason
from midflight.recipe.config import ShapingConfig, TrainingConfig
from midflight.training.advantages import Outcome, Placed, carries, estimate, has_signal
from midflight.training.losses import KL_ESTIMATES
from midflight.training.packing import Row
from midflight.training.rollouts import Group


@dataclass(frozen=True)
class Place:
    """Where a row comes from: group, scored trajectory and turn, each by index."""

    group: int
    trajectory: int
    turn: int


def overlong(trajectory: Trajectory) -> bool:
    """Whether a turn was cut off by the token limit, or the prompt outgrew the context."""
    cut = any(turn.generation.finish_reason is FinishReason.LENGTH for turn in trajectory.turns)
    return cut or trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW


def turn_cost(turn: Turn, shaping: ShapingConfig) -> float:
    """What a turn takes off the outcome."""
    error = turn.result.error
    cost = shaping.turn + shaping.length * turn.generation.forced.count(False)
    if error is ErrorKind.INVALID_ACTION:
        cost += shaping.format_error
    elif error is not None:
        cost += shaping.tool_error
    return cost


def outcome(trajectory: Trajectory, reward: float, settings: TrainingConfig, kl: Sequence[float] = ()) -> Outcome:
    """What an estimator sees. `kl` are further costs of the turns."""
    if settings.overlong == "penalise" and overlong(trajectory):
        reward -= settings.overlong_penalty
    costs = [turn_cost(turn, settings.shaping) for turn in trajectory.turns]
    return Outcome(
        reward=reward,
        turn_rewards=tuple(-cost - more for cost, more in zip(costs, kl or [0.0] * len(costs), strict=True)),
        states=tuple(turn.generation.prompt_ids for turn in trajectory.turns),
    )


def with_signal(groups: Sequence[Group], settings: TrainingConfig) -> int:
    """How many groups would train, were they the batch: any of their advantages is not zero, without a KL."""
    return sum(carries(placed) for placed in advantages(groups, settings))


def _differ(groups: Sequence[Group], settings: TrainingConfig) -> bool:
    scored = [one for group in groups for one in group.scored]
    return has_signal([outcome(trajectory, reward, settings).total for trajectory, reward in scored])


def rows_of(groups: Sequence[Group]) -> dict[Place, Row]:
    """One row a planner turn that has something to train, without advantage and weight."""
    rows = {}
    number = 0
    for g, group in enumerate(groups):
        for i, (trajectory, _) in enumerate(group.scored):
            for t, turn in enumerate(trajectory.turns):
                drawn = turn.generation
                if not all(drawn.forced):
                    rows[Place(g, i, t)] = Row(
                        prompt_ids=drawn.prompt_ids,
                        ids=drawn.ids,
                        logprobs=drawn.logprobs,
                        forced=drawn.forced,
                        temperature=drawn.sampling.temperature,
                        grammar=drawn.grammar,
                        supports=drawn.supports,
                        trajectory=number,
                        weights_version=drawn.weights_version,
                    )
            number += 1
    return rows


def turn_kl(row: Row, settings: TrainingConfig) -> float:
    """kl_beta times the summed estimate of a row's KL to the reference, under the log-probs it was drawn with."""
    assert row.reference is not None, "the reference scores the rows first"
    free = [index for index, forced in enumerate(row.forced) if not forced]
    drawn, reference = (torch.tensor([values[index] for index in free]) for values in (row.logprobs, row.reference))
    return settings.kl_beta * float(KL_ESTIMATES[settings.kl_estimate](drawn, reference).sum())


def advantages(groups: Sequence[Group], settings: TrainingConfig, rows: dict[Place, Row] | None = None) -> list[Placed]:
    """The advantage of every turn of every scored trajectory; `rows` bring the KL where it is part of the reward.

    An estimator that divides by a std gets no KL where nothing else differs: it would scale rounding to +-1.
    """
    outcomes: list[list[Outcome]] = []
    for g, group in enumerate(groups):
        outcomes.append([])
        divided = {"dr_grpo": None, "rloo": None, "reinforce_pp": groups}.get(settings.advantage, [group])
        costs_kl = divided is None or _differ(divided, settings)
        for i, (trajectory, reward) in enumerate(group.scored):
            kl = [0.0] * len(trajectory.turns)
            if rows is not None and settings.kl_in == "reward" and costs_kl:
                found = [rows.get(Place(g, i, t)) for t in range(len(trajectory.turns))]
                kl = [0.0 if row is None or row.reference is None else turn_kl(row, settings) for row in found]
            outcomes[-1].append(outcome(trajectory, reward, settings, kl))
    gigpo = settings.gigpo
    return estimate(settings.advantage, outcomes, step_weight=gigpo.step_weight, discount=gigpo.discount)


def weighted_rows(
    groups: Sequence[Group], rows: dict[Place, Row], placed: Sequence[Placed], settings: TrainingConfig
) -> list[Row]:
    """The rows that train, with advantage and weight. The denominators, over groups whose advantages are not all zero:

    - `trajectory`: 1 / (groups * G * T_i * |a|), G the scored trajectories of the group (Flow-GRPO, arXiv 2510.05592);
    - `turn`: 1 / (turns * |a|), of turns with a token that was drawn freely;
    - `token`: 1 / tokens (DAPO, arXiv 2503.14476).

    Masked trajectories count in the denominators.
    """
    live = [carries(group) for group in placed]
    kept = {place: row for place, row in rows.items() if live[place.group]}
    free = {place: row.forced.count(False) for place, row in kept.items()}
    made = []
    for place, row in kept.items():
        group = groups[place.group]
        trajectory = group.scored[place.trajectory][0]
        if settings.overlong == "mask" and overlong(trajectory):
            continue
        if settings.weighting == "trajectory":
            weight = 1.0 / (sum(live) * len(group.scored) * len(trajectory.turns) * free[place])
        elif settings.weighting == "turn":
            weight = 1.0 / (len(kept) * free[place])
        else:
            weight = 1.0 / sum(free.values())
        made.append(replace(row, advantage=placed[place.group][place.trajectory][place.turn], weight=weight))
    return made
