"""Advantages: pure functions on the rewards of groups. No configuration, no tensors.

An estimator gives each trajectory one number, which `broadcast` lays on all its turns, or places a number on each turn
itself (`gigpo`). Invariant: a group is its trajectories; how many turns or tokens each took changes nothing but where a
number is placed. A group whose advantages are all zero carries no signal, and what only rounding tells apart is alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

TOLERANCE = 1e-9
"""Numbers that differ by no more than this share of the larger are alike. The same costs in another order make sums
that differ by their rounding, which a division by their std would scale to full strength."""


@dataclass(frozen=True)
class Outcome:
    """What an estimator sees of one trajectory.

    `reward` is the verifiable outcome; `turn_rewards[t]` are what turns add to it (costs are negative); `states[t]`
    names the memory state that turn t was planned in.
    """

    reward: float
    turn_rewards: tuple[float, ...]
    states: tuple[Hashable, ...] = ()

    @property
    def total(self) -> float:
        """R_i: the outcome and what its turns add."""
        return _sum((self.reward, *self.turn_rewards))

    def returns(self, discount: float) -> list[float]:
        """The discounted return from each turn on; the outcome comes with the last turn."""
        found: list[float] = []
        following = self.reward
        for index, reward in enumerate(reversed(self.turn_rewards)):
            following = _sum((reward, following if index == 0 else discount * following))
            found.append(following)
        return found[::-1]


Group = Sequence[Outcome]
Placed = list[list[float]]
"""An advantage for each turn of each trajectory of a group."""


def flow_grpo(rewards_G: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean R) / std R over the G trajectories of a group, population std (arXiv 2510.05592).

    Rewards that are all equal carry no signal and give zeros.
    """
    return _normalised(rewards_G, rewards_G, correction=0)


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """A_i = R_i - mean R: no division by the std, which weighs easy and hard questions more (arXiv 2503.20783).

    The paper also divides by a constant in place of the length; `training.weighting: token` divides by the batch's
    tokens, so only within a batch does a token of a long answer weigh what one of a short answer does.
    """
    if not has_signal(rewards_G):
        return [0.0] * len(rewards_G)
    mean = fsum(rewards_G) / len(rewards_G)
    return [_above(mean, reward) for reward in rewards_G]


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """A_i = R_i - mean of the other G - 1 rewards: leave-one-out (arXiv 2402.14740)."""
    count = len(rewards_G)
    return [advantage * count / (count - 1) for advantage in dr_grpo(rewards_G)] if count > 1 else [0.0] * count


def reinforce_pp(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """A_i = (R_i - mean R) / std R over all trajectories of the batch, population std (REINFORCE++, arXiv 2501.03262).

    A group whose rewards are all alike still differs from the batch and trains.
    """
    values = iter(flow_grpo([reward for group in groups for reward in group]))
    return [[next(values) for _ in group] for group in groups]


def gigpo(group: Group, *, step_weight: float, discount: float) -> Placed:
    """A_i^t = A_i + step_weight * A'_i^t: groups within the group (GiGPO, arXiv 2505.10978).

    A_i is that of `flow_grpo`. A'_i^t compares the discounted returns of all turns of the group that were planned in
    the same state: (return - mean) / population std, 0 where a state was met once or all its returns are alike.
    """
    outer = flow_grpo([outcome.total for outcome in group])
    returns = [outcome.returns(discount) for outcome in group]
    met: dict[Hashable, list[tuple[int, int]]] = {}
    for i, outcome in enumerate(group):
        for t, state in enumerate(outcome.states):
            met.setdefault(state, []).append((i, t))
    placed = broadcast(outer, [len(outcome.turn_rewards) for outcome in group])
    for places in met.values():
        for (i, t), inner in zip(places, flow_grpo([returns[i][t] for i, t in places]), strict=True):
            placed[i][t] += step_weight * inner
    return placed


def turn_normalised(rewards_G: Sequence[float], turns_G: Sequence[int]) -> list[float]:
    """The fault of the paper's released code, for the ablation: mean and n-1 std run over all turns of the group.

    Rewards 1, 1, 0 x 6 with turns 1, 1, 3 x 6 give +2.92 and -0.32 in place of +1.73 and -0.58.
    """
    over_turns = [reward for reward, turns in zip(rewards_G, turns_G, strict=True) for _ in range(turns)]
    return _normalised(rewards_G, over_turns, correction=1)


def broadcast(advantages_G: Sequence[float], turns_G: Sequence[int]) -> Placed:
    """The rule of Flow-GRPO: each turn of a trajectory has the trajectory's advantage."""
    return [[advantage] * turns for advantage, turns in zip(advantages_G, turns_G, strict=True)]


BY_GROUP = {"flow_grpo": flow_grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Estimators that look at the rewards of one group."""


def estimate(name: str, groups: Sequence[Group], *, step_weight: float = 1.0, discount: float = 1.0) -> list[Placed]:
    """The advantages of a batch of groups under the estimator `name`; the last two are `gigpo`'s."""
    if name == "gigpo":
        return [gigpo(group, step_weight=step_weight, discount=discount) for group in groups]
    rewards = [[outcome.total for outcome in group] for group in groups]
    turns = [[len(outcome.turn_rewards) for outcome in group] for group in groups]
    if name == "reinforce_pp":
        numbers = reinforce_pp(rewards)
    elif name == "turn_normalised":
        numbers = [turn_normalised(*pair) for pair in zip(rewards, turns, strict=True)]
    else:
        numbers = [BY_GROUP[name](group) for group in rewards]
    return [broadcast(*pair) for pair in zip(numbers, turns, strict=True)]


def carries(placed: Placed) -> bool:
    """Whether a group trains: any of its advantages is not zero."""
    return any(value != 0 for turns in placed for value in turns)


def has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether the rewards differ by more than rounding."""
    return len(rewards_G) > 1 and _differ(max(rewards_G), min(rewards_G))


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > TOLERANCE * max(abs(one), abs(other))


def _above(mean: float, value: float) -> float:
    """How far a value is above the mean; 0 where they are alike, so that `carries` sees no rounding."""
    return value - mean if _differ(value, mean) else 0.0


def _sum(parts: Sequence[float]) -> float:
    """The sum; 0 where the parts cancel up to rounding, of which no share could be told."""
    found = fsum(parts)
    return 0.0 if abs(found) <= TOLERANCE * max(map(abs, parts)) else found


def _normalised(values: Sequence[float], population: Sequence[float], correction: int) -> list[float]:
    if not has_signal(population):
        return [0.0] * len(values)
    mean = fsum(population) / len(population)
    variance = fsum(_above(mean, value) ** 2 for value in population) / (len(population) - correction)
    if variance == 0:  # they differ by less than a float can square
        return [0.0] * len(values)
    return [_above(mean, value) / sqrt(variance) for value in values]
