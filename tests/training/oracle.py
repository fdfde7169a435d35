"""Flow-GRPO and its relatives, literally: loops over the formulas, `math` alone. Slow, and the measure of the rest.

A group is a list of trajectories; see `Trajectory` and `Token`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass
class Token:
    new: float
    drawn: float
    ref: float = 0.0
    entropy: float = 0.0
    old: float | None = None
    """The trainer's before the update, where it is not what drew the token."""


@dataclass
class Turn:
    tokens: list[Token]
    reward: float = 0.0
    state: object = None
    invalid: bool = False
    """Its text was no action."""
    failed: bool = False
    """Its call failed."""
    cut: bool = False
    """Its text was cut off at the token limit."""


@dataclass
class Trajectory:
    reward: float
    turns: list[Turn] = field(default_factory=list)


def mean(values):
    return sum(values) / len(values)


def standardised(value, values):
    spread = math.sqrt(mean([(one - mean(values)) ** 2 for one in values]))
    return (value - mean(values)) / spread if max(values) > min(values) and spread > 0 else 0.0


def total(trajectory):
    return trajectory.reward + sum(turn.reward for turn in trajectory.turns)


def return_from(trajectory, t, discount):
    last = len(trajectory.turns) - 1
    found = sum(discount ** (k - t) * trajectory.turns[k].reward for k in range(t, last + 1))
    return found + discount ** (last - t) * trajectory.reward


def advantage(groups, g, i, t, name, step_weight=1.0, discount=1.0):
    group = groups[g]
    rewards = [total(one) for one in group]
    own = rewards[i]
    if name == "flow_grpo":
        return standardised(own, rewards)
    if name == "dr_grpo":
        return own - mean(rewards)
    if name == "rloo":
        others = [reward for k, reward in enumerate(rewards) if k != i]
        return own - mean(others) if others else 0.0
    if name == "reinforce_pp":
        return standardised(own, [total(one) for some in groups for one in some])
    if name == "gigpo":
        state = group[i].turns[t].state
        peers = [
            return_from(one, k, discount) for one in group for k, turn in enumerate(one.turns) if turn.state == state
        ]
        return standardised(own, rewards) + step_weight * standardised(return_from(group[i], t, discount), peers)
    if name == "turn_normalised":
        over = [reward for one, reward in zip(group, rewards, strict=True) for _ in one.turns]
        if max(over) == min(over):
            return 0.0
        return (own - mean(over)) / math.sqrt(sum((one - mean(over)) ** 2 for one in over) / (len(over) - 1))
    raise ValueError(name)


def clip(ratio, low, high):
    return min(max(ratio, 1 - low), 1 + high)


def clipped_term(ratio, a, low, high, dual):
    term = min(ratio * a, clip(ratio, low, high) * a)
    return max(term, dual * a) if dual is not None and a < 0 else term


def term(turn, token, a, surrogate, low, high, dual, cap):
    """The policy's term of one token, with its importance weight."""
    base = token.drawn if cap is None else token.old
    shifts = [one.old - one.drawn for one in (turn.tokens if surrogate == "gspo" else [token])] if cap else [0.0]
    weight = 1.0 if cap is None else min(math.exp(mean(shifts)), cap)
    if surrogate == "ppo_clip":
        value = clipped_term(math.exp(token.new - base), a, low, high, dual)
    elif surrogate == "gspo":
        gaps = [one.new - (one.drawn if cap is None else one.old) for one in turn.tokens]
        value = clipped_term(math.exp(mean(gaps)), a, low, high, dual)
    elif surrogate == "cispo":
        value = clip(math.exp(token.new - base), low, high) * a * token.new
    elif surrogate == "reinforce":
        value = a * token.new
    return weight * value


def kl(token, name):
    gap = token.ref - token.new
    return {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - gap - 1}[name]


def overlong(trajectory):
    return any(turn.cut for turn in trajectory.turns)


def shaped(trajectory, costs, penalty=0.0, kl_beta=0.0, kl_name="k3"):
    """With what its turns cost in their rewards, and the penalty of an over-long one off its outcome."""
    turns = []
    for turn in trajectory.turns:
        reward = turn.reward - costs["turn"]
        for token in turn.tokens:
            reward -= costs["length"]
            reward -= kl_beta * kl(Token(token.drawn, token.drawn, token.ref), kl_name)
        if turn.invalid:
            reward -= costs["format_error"]
        elif turn.failed:
            reward -= costs["tool_error"]
        turns.append(replace(turn, reward=reward))
    return Trajectory(trajectory.reward - (penalty if overlong(trajectory) else 0.0), turns)


def weight(groups, group, trajectory, turn, weighting):
    turns = [one for some in groups for path in some for one in path.turns]
    if weighting == "trajectory":
        return 1 / (len(groups) * len(group) * len(trajectory.turns) * len(turn.tokens))
    if weighting == "turn":
        return 1 / (len(turns) * len(turn.tokens))
    return 1 / sum(len(one.tokens) for one in turns)


def loss(
    groups,
    advantages,
    *,
    surrogate="ppo_clip",
    weighting="trajectory",
    low=0.2,
    high=0.2,
    dual=None,
    kl_name="k3",
    kl_beta=0.0,
    entropy_beta=0.0,
    cap=None,
):
    """-J; `advantages[g][i][t]`. All `groups` carry signal."""
    found = 0.0
    for g, group in enumerate(groups):
        for i, trajectory in enumerate(group):
            for t, turn in enumerate(trajectory.turns):
                w = weight(groups, group, trajectory, turn, weighting)
                for token in turn.tokens:
                    value = term(turn, token, advantages[g][i][t], surrogate, low, high, dual, cap)
                    found -= w * (value - kl_beta * kl(token, kl_name) + entropy_beta * token.entropy)
    return found
