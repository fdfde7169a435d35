"""Losses: pure functions on the log-probs of trained tokens. Denominators are inside the weights, global and explicit.

Invariant: a loss is a weighted sum over tokens, so splitting, merging, permuting, padding or
packing the rows leaves its value and gradient unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """N trained tokens (forced ones are not among them); every tensor is [N], only `logprobs` and `entropies` carry a
    gradient.

    `weights` hold the whole denominator, such as 1 / (groups * G * T_i * |a_i^t|) for each token of turn t of
    trajectory i. `turn_gaps` are the mean of logprob - behaviour over the turn a token belongs to (for `gspo`);
    `corrections` multiply the policy's term of a token: truncated importance weights.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None
    entropies: Tensor | None = None
    turn_gaps: Tensor | None = None
    corrections: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """The loss to minimise, and sums over tokens for the log (divide by what you know)."""

    loss: Tensor
    clipped: Tensor
    """Number of tokens whose gradient, or whose weight in it, a clip changed."""
    kl: Tensor
    """Weighted k3 estimate of KL(policy || reference)."""
    entropy: Tensor
    """Weighted entropy of the distributions the tokens were drawn from."""
    ratio_max: Tensor


@dataclass(frozen=True)
class Surrogate:
    """The policy's term of each token, to be maximised, and where a clip bit; both [N]."""

    objective: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class Clip:
    """The trust region: ratios in [1 - low, 1 + high]; `dual` bounds what a negative advantage can lose."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


def ppo_clip(inputs: LossInputs, clip: Clip) -> Surrogate:
    """min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(logprob - behaviour) (PPO, arXiv 1707.06347).

    high > low is clip-higher (DAPO, arXiv 2503.14476). With `dual` a term of negative advantage is at least dual * A
    (dual clip, arXiv 1912.09729).
    """
    return _clipped((inputs.logprobs - inputs.behaviour).exp(), inputs.advantages, clip)


def gspo(inputs: LossInputs, clip: Clip) -> Surrogate:
    """The same with one ratio a turn: s = exp(mean over the turn's tokens of logprob - behaviour) (arXiv 2507.18071).

    Here a sequence is a turn's trained tokens. Each token has the term sg(s) exp(logprob - sg(logprob)): summed over a
    turn, value and gradient are those of the sequence's, and a turn may come in pieces.
    """
    assert inputs.turn_gaps is not None, "gspo needs the means over turns"
    here = (inputs.logprobs - inputs.logprobs.detach()).exp()
    return _clipped(inputs.turn_gaps.exp() * here, inputs.advantages, clip)


def cispo(inputs: LossInputs, clip: Clip) -> Surrogate:
    """sg(clip(rho, 1 - low, 1 + high)) A logprob: no token loses its gradient (CISPO, arXiv 2506.13585)."""
    ratio = (inputs.logprobs - inputs.behaviour).exp().detach()
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    return Surrogate(bounded * inputs.advantages * inputs.logprobs, bounded != ratio)


def reinforce(inputs: LossInputs, clip: Clip) -> Surrogate:
    """A logprob (Williams 1992): no ratio and no clip, for data of the weights that train."""
    return Surrogate(inputs.advantages * inputs.logprobs, torch.zeros_like(inputs.logprobs, dtype=torch.bool))


SURROGATES: dict[str, Callable[[LossInputs, Clip], Surrogate]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """logprob - ref: unbiased for KL(policy || reference) (Schulman 2020, Approximating KL Divergence).

    In a loss its expected gradient is zero: use it as a reward.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(logprob - ref)^2 / 2: biased and never negative; in a loss its expected gradient is the KL's (as `k1`)."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(ref - logprob) - (ref - logprob) - 1: unbiased and never negative (as `k1`)."""
    gap = reference - logprobs
    return gap.exp() - gap - 1


KL_ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def importance_corrections(drawn: Tensor, old: Tensor, cap: float) -> Tensor:
    """min(exp(old - drawn), cap): weights for tokens that another policy drew (Ionides 2008).

    `drawn` are the sampler's log-probs, `old` the trainer's before the first update, both [N]. For `gspo` all tokens
    of a turn take the means over the turn: one weight a turn, as one ratio.
    """
    return (old - drawn).exp().clamp(max=cap)


def objective(
    inputs: LossInputs,
    *,
    surrogate: str = "ppo_clip",
    clip: Clip = Clip(),  # noqa: B008 - frozen
    kl_beta: float = 0.0,
    kl_estimate: str = "k3",
    entropy_beta: float = 0.0,
) -> LossOutput:
    """-J: J = sum_tokens w (c * surrogate) - kl_beta sum_tokens w k(logprob, ref) + entropy_beta sum_tokens w H.

    With the defaults and a `kl_beta` this is Flow-GRPO's objective (arXiv 2510.05592).
    """
    term = SURROGATES[surrogate](inputs, clip)
    weights = inputs.weights if inputs.corrections is None else inputs.weights * inputs.corrections
    loss = -(weights * term.objective).sum()
    zero = torch.zeros((), device=loss.device)
    kl = entropy = zero
    if inputs.reference is not None:
        kl = (inputs.weights * k3(inputs.logprobs, inputs.reference)).sum().detach()
        if kl_beta > 0:
            estimate = KL_ESTIMATES[kl_estimate](inputs.logprobs, inputs.reference)
            loss = loss + kl_beta * (inputs.weights * estimate).sum()
    if inputs.entropies is not None:
        entropy = (inputs.weights * inputs.entropies).sum()
        if entropy_beta > 0:
            loss = loss - entropy_beta * entropy
    ratio = (inputs.logprobs.detach() - inputs.behaviour).exp()
    return LossOutput(
        loss=loss,
        clipped=term.clipped.sum().detach(),
        kl=kl,
        entropy=entropy.detach(),
        ratio_max=ratio.max() if ratio.numel() else zero,
    )


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> Surrogate:
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    objective = torch.minimum(plain, bounded)
    if clip.dual is not None:
        floor = torch.where(advantages < 0, clip.dual * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    return Surrogate(objective, objective != plain)
