"""Advantages: pure functions on the rewards of one group. No configuration, no tensors.

Invariant: a group is its trajectories; how many turns or tokens each took changes nothing in `flow_grpo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt


def flow_grpo(rewards_G: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean R) / std R over the G trajectories of a group, population std (arXiv 2510.05592).

    Rewards that are all equal carry no signal and give zeros.
    """
    return _normalised(rewards_G, rewards_G, correction=0)


def turn_normalised(rewards_G: Sequence[float], turns_G: Sequence[int]) -> list[float]:
    """The fault of the paper's released code, for the ablation: mean and n-1 std run over all turns of the group.

    Rewards 1, 1, 0 x 6 with turns 1, 1, 3 x 6 give +2.92 and -0.32 in place of +1.73 and -0.58.
    """
    over_turns = [reward for reward, turns in zip(rewards_G, turns_G, strict=True) for _ in range(turns)]
    return _normalised(rewards_G, over_turns, correction=1)


def has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether the group's rewards differ at all."""
    return len(rewards_G) > 1 and max(rewards_G) > min(rewards_G)


def _normalised(values: Sequence[float], population: Sequence[float], correction: int) -> list[float]:
    if not has_signal(population):
        return [0.0] * len(values)
    mean = fsum(population) / len(population)
    variance = fsum((value - mean) ** 2 for value in population) / (len(population) - correction)
    if variance == 0:  # they differ by less than a float can square
        return [0.0] * len(values)
    return [(value - mean) / sqrt(variance) for value in values]
