"""One update: gradients over all packs, the drift check, clipping, the optimizer.

Invariant: before the first weight moves, the trainer's log-prob of every trained token has been compared with the
sampler's; drift over the bound stops the run with both numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from midflight.config import TrainingConfig
from midflight.engines.local.grammar import Masks
from midflight.training.losses import LossInputs, flow_grpo_loss
from midflight.training.packing import Pack, PackedBatch
from midflight.training.policy import Policy
from midflight.training.update import Scores, run


class DriftError(RuntimeError):
    """Sampler and trainer disagree on the log-prob of a trained token."""


@dataclass
class UpdateMetrics:
    """Sums and maxima over one update."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio_max: float = 0.0
    drift: float = 0.0
    grad_norm: float = 0.0
    trained_tokens: int = 0
    scored_tokens: int = 0
    """Over all epochs."""

    def record(self) -> dict[str, float]:
        """As it goes into the metrics."""
        return {
            "loss": self.loss,
            "kl": self.kl,
            "entropy": self.entropy,
            "clip_fraction": self.clipped / max(self.scored_tokens, 1),
            "ratio_max": self.ratio_max,
            "drift": self.drift,
            "grad_norm": self.grad_norm,
            "trained_tokens": self.trained_tokens,
        }


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    sampler: Any,
    masks: Masks,
    batch: PackedBatch,
    settings: TrainingConfig,
) -> UpdateMetrics:
    """`settings.epochs` optimizer steps on one batch; the metrics are of the first, clipping and ratio of all.

    `sampler` is the model the batch was drawn from; it holds the policy's weights. The caller syncs it afterwards.

    Raises:
        DriftError: a log-prob of the first pass is off by more than `settings.max_drift`.
    """
    reference: dict[tuple[int, int], float] = {}
    if settings.kl_beta > 0:
        with torch.no_grad(), policy.frozen() as model:
            run(model, masks, batch, lambda pack, scores: _remember(reference, pack, scores))
    metrics = UpdateMetrics()
    for epoch in range(settings.epochs):
        if epoch > 0:
            policy.write(sampler)
        optimizer.zero_grad(set_to_none=True)
        tokens = 0

        def on_scores(pack: Pack, scores: Scores, epoch: int = epoch) -> torch.Tensor:
            nonlocal tokens
            tokens += len(scores.terms)
            return _loss(batch, pack, scores, reference, settings, metrics, first=epoch == 0)

        with policy.scoring(sampler) as model:
            run(model, masks, batch, on_scores)
        metrics.scored_tokens += tokens
        if epoch == 0:
            metrics.trained_tokens = tokens
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm))
        metrics.grad_norm = max(metrics.grad_norm, norm)
        optimizer.step()
    masks.forget_replays()
    return metrics


def _remember(reference: dict[tuple[int, int], float], pack: Pack, scores: Scores) -> None:
    for number, logprob in zip(scores.terms, scores.logprobs.tolist(), strict=True):
        term = pack.terms[number]
        reference[term.row, term.position] = logprob


def _loss(
    batch: PackedBatch,
    pack: Pack,
    scores: Scores,
    reference: dict[tuple[int, int], float],
    settings: TrainingConfig,
    metrics: UpdateMetrics,
    *,
    first: bool,
) -> torch.Tensor:
    terms = [pack.terms[number] for number in scores.terms]
    rows = [batch.rows[term.row] for term in terms]

    def tensor(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, device=scores.logprobs.device, dtype=torch.float32)

    behaviour = tensor([row.logprobs[term.position] for row, term in zip(rows, terms, strict=True)])
    if first:
        gaps = (scores.logprobs.detach() - behaviour).abs()
        worst = int(gaps.argmax())  # that of a NaN, if there is one
        gap = float(gaps[worst])
        metrics.drift = max(metrics.drift, gap)
        if not gap <= settings.max_drift:
            raise DriftError(
                f"sampler and trainer disagree: log-prob {float(behaviour[worst]):.6f} when drawn, "
                f"{float(scores.logprobs[worst].detach()):.6f} in the trainer, a drift over training.max_drift = "
                f"{settings.max_drift:g} (token {rows[worst].ids[terms[worst].position]})"
            )
    output = flow_grpo_loss(
        LossInputs(
            logprobs=scores.logprobs,
            behaviour=behaviour,
            advantages=tensor([row.advantage for row in rows]),
            weights=tensor([row.weight for row in rows]),
            reference=tensor([reference[term.row, term.position] for term in terms]) if reference else None,
            entropies=scores.entropies,
        ),
        epsilon=settings.clip_epsilon,
        kl_beta=settings.kl_beta,
        entropy_beta=settings.entropy_beta,
    )
    if first:
        metrics.loss += float(output.loss.detach())
        metrics.kl += float(output.kl)
        metrics.entropy += float(output.entropy)
    metrics.clipped += float(output.clipped)
    metrics.ratio_max = max(metrics.ratio_max, float(output.ratio_max))
    return output.loss


def learning_rate(settings: TrainingConfig, step: int) -> float:
    """The rate of step `step` (from 1): linear warm-up, then linear decay to `final_rate` of itself at the last."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / (settings.warmup_steps + 1)
    span = settings.steps - settings.warmup_steps - 1
    done = (step - settings.warmup_steps - 1) / span if span > 0 else 0.0
    return settings.learning_rate * (1 - done * (1 - settings.final_rate))
