"""Losses: pure functions on the log-probs of trained tokens. Denominators are inside the weights, global and explicit.

Invariant: a loss is a weighted sum over tokens, so splitting, merging, permuting, padding or packing the rows
leaves its value and gradient unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """N trained tokens (forced ones are not among them); every tensor is [N], only `logprobs` carries a gradient.

    `weights` hold the whole denominator: 1 / (groups * G * T_i * |a_i^t|) for each token of turn t of trajectory i.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None
    entropies: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """The loss to minimise, and sums over tokens for the log (divide by what you know)."""

    loss: Tensor
    clipped: Tensor
    """Number of tokens whose ratio was clipped in effect."""
    kl: Tensor
    """Weighted k3 estimate of KL(policy || reference)."""
    entropy: Tensor
    """Weighted entropy of the distributions the tokens were drawn from."""
    ratio_max: Tensor


def flow_grpo_loss(inputs: LossInputs, *, epsilon: float, kl_beta: float, entropy_beta: float) -> LossOutput:
    """-J of Flow-GRPO (arXiv 2510.05592), plus an optional entropy bonus.

    J = sum_tokens w min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta sum_tokens w k3 + c sum_tokens w H,
    rho = exp(logprob - behaviour), k3 = exp(ref - logprob) - (ref - logprob) - 1.
    """
    ratio = (inputs.logprobs - inputs.behaviour).exp()
    plain = ratio * inputs.advantages
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon) * inputs.advantages
    loss = -(inputs.weights * torch.minimum(plain, clipped)).sum()
    zero = torch.zeros((), device=loss.device)
    kl = zero
    if inputs.reference is not None:
        gap = inputs.reference - inputs.logprobs
        kl = (inputs.weights * (gap.exp() - gap - 1)).sum()
        loss = loss + kl_beta * kl
    entropy = zero
    if inputs.entropies is not None:
        entropy = (inputs.weights * inputs.entropies).sum()
        loss = loss - entropy_beta * entropy
    return LossOutput(
        loss=loss,
        clipped=(clipped < plain).sum().detach(),
        kl=kl.detach(),
        entropy=entropy.detach(),
        ratio_max=ratio.max().detach() if ratio.numel() else zero,
    )
