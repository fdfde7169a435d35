"""One update: the drift check, gradients over all packs, clipping, the optimizer.

Invariant: before the first weight moves, the trainer's log-prob of every trained token has been compared with the
sampler's (`drift.py`).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from midflight.engines.local.grammar import Masks
from midflight.engines.local.memory import is_out_of_memory
from midflight.engines.local.support import is_ours
from midflight.recipe.config import TrainingConfig
from midflight.training.drift import DriftCheck, drift_cause, without
from midflight.training.losses import Clip, LossInputs, importance_corrections, objective
from midflight.training.packing import Pack, PackedBatch, Row, pack_rows, rows_apart
from midflight.training.policy import Policy
from midflight.training.update import Scores, run, score_rows

T = TypeVar("T")

MOST_SKIPPED = 3
"""Updates in a row whose gradient is not finite before the run stops."""
LEAST_PACK = 64
"""Tokens below which a pack is not split further when memory runs out."""


class GradientError(RuntimeError):
    """The gradient was not finite too often in a row."""


class OutOfMemory(RuntimeError):
    """Not even the smallest packs fit, or a row of a model that takes it whole."""


@dataclass
class UpdateMetrics:
    """Sums and maxima over one update."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio_max: float = 0.0
    drift: float = 0.0
    drift_cause: str = ""
    """What may make sampler and trainer differ: see `drift_cause`."""
    drift_left_out: int = 0
    """Tokens that did not train since they drifted over the bound."""
    grad_norm: float = 0.0
    trained_tokens: int = 0
    unique_tokens: int = 0
    """Tokens of a pass as packed."""
    total_tokens: int = 0
    """Tokens of a pass, were each row computed by itself."""
    scored_tokens: int = 0
    """Over all epochs."""
    skipped_updates: int = 0
    """Optimizer steps left out because the gradient was not finite."""
    pack_tokens: int = 0
    """The bound on a forward that memory allowed."""

    def record(self) -> dict[str, Any]:
        """As it goes into the metrics."""
        record = {**asdict(self), "clip_fraction": self.clipped / max(self.scored_tokens, 1)}
        return {name: value for name, value in record.items() if name not in ("clipped", "scored_tokens")}


class Updater:
    """Turns rows into optimizer steps. `pack_tokens` starts as the recipe's and halves when memory runs out.

    Args:
        sampler: the model the rows were drawn from, with the policy's weights. `update` leaves it behind by its last
            optimizer step: the caller syncs.
        exact: compute the policy's scores with `exact` attention, as the rows were drawn.
        rescue: folder for the rows of updates without a finite gradient.
        note: takes a line for the user.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        sampler: Any,
        masks: Masks,
        settings: TrainingConfig,
        *,
        exact: bool = False,
        rescue: Path | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        self.policy, self.optimizer, self.sampler, self.masks = policy, optimizer, sampler, masks
        self.settings, self.rescue, self.note = settings, rescue, note
        self.pack_tokens = settings.pack_tokens
        self.flex, self.exact = settings.attention == "flex", exact
        self.steps = 0
        """Optimizer steps that were made."""
        self._skipped: list[list[Row]] = []  # the rows of the updates skipped in a row; none of those before a resume

    @property
    def skipped_in_a_row(self) -> int:
        """Updates left out since the last that was made; a checkpoint keeps the number, not their rows."""
        return len(self._skipped)

    @skipped_in_a_row.setter
    def skipped_in_a_row(self, count: int) -> None:
        self._skipped = [[] for _ in range(count)]

    def with_reference(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the reference model's log-probs."""

        def score(batch: PackedBatch) -> list[tuple[float, ...]]:
            with self.policy.frozen() as model:
                return score_rows(model, self.masks, batch, flex=self.flex)

        found = self._fitting(rows, score)
        return [replace(row, reference=values) for row, values in zip(rows, found, strict=True)]

    def update(self, rows: Sequence[Row], *, version: int = 0, seed: int = 0, drawn: bool = True) -> UpdateMetrics:
        """`epochs` passes over `rows`, each in `mini_batches` optimizer steps; the metrics are of the first pass.

        `version` is that of the weights the rows should be drawn with; `seed` deals trajectories to mini-batches.
        Rows that were not `drawn` here, demonstrations, have no log-prob to compare with: there is no drift.

        Raises:
            DriftError: log-probs are off by more than `max_drift` before the first optimizer step; see `DriftCheck`.
            GradientError: the gradient was not finite `MOST_SKIPPED` times in a row.
            OutOfMemory: no pack fits.
        """
        settings = self.settings
        dtype = next(self.policy.causal.parameters()).dtype
        metrics = UpdateMetrics(drift_cause=drift_cause(rows, version, dtype))
        rows = list(rows)
        check = DriftCheck(settings.max_drift, settings.max_drift_share, metrics.drift_cause) if drawn else None
        if settings.importance_cap is not None or settings.mini_batches > 1:
            rows = self._with_old(rows, check, metrics)
            check = None
        first = True
        for epoch in range(settings.epochs):
            parts = mini_batches(rows, settings.mini_batches, seed + epoch)
            for part in parts:
                if not first:
                    self.policy.write(self.sampler)
                self._step(part, metrics, check, share=1 / len(parts) if epoch == 0 else 0.0)
                first = False
            if check is not None:
                rows, check = without(rows, check.left_out), None
        self.masks.forget_replays()
        metrics.pack_tokens = self.pack_tokens
        return metrics

    def _with_old(self, rows: list[Row], check: DriftCheck | None, metrics: UpdateMetrics) -> list[Row]:
        """The rows with the trainer's own log-probs, without those tokens that `check` leaves out."""
        found = self._fitting(rows, self._score)
        scored = [replace(row, old=old) for row, old in zip(rows, found, strict=True)]
        if check is None:
            return scored
        for number, (row, old) in enumerate(zip(rows, found, strict=True)):
            free = [index for index, forced in enumerate(row.forced) if not forced]
            ours, theirs = (torch.tensor([values[index] for index in free]) for values in (old, row.logprobs))
            check.compare(ours, theirs, [(number, index) for index in free])
        self._conclude(check, metrics)
        return without(scored, check.left_out)

    def _conclude(self, check: DriftCheck, metrics: UpdateMetrics) -> None:
        """Note what a check found, or stop the run."""
        metrics.drift, metrics.drift_left_out = check.largest, len(check.left_out)
        if told := check.conclude():
            self.note(told)

    def _step(self, rows: list[Row], metrics: UpdateMetrics, check: DriftCheck | None, *, share: float) -> None:
        """One optimizer step on `rows`, which are `share` of the first pass (0: of a later one)."""
        gaps: list[float] = []
        if self.settings.loss == "gspo":
            gaps = self._turn_gaps(rows)

        def gradients(batch: PackedBatch) -> tuple[PackedBatch, UpdateMetrics]:
            self.optimizer.zero_grad(set_to_none=True)
            part = UpdateMetrics()
            if check is not None:
                check.restart()
            with self.policy.scoring(self.sampler) as model:
                run(
                    model,
                    self.masks,
                    batch,
                    lambda pack, scores: self._loss(batch, pack, scores, part, gaps, check),
                    entropy_grad=self.settings.entropy_beta > 0,
                    flex=self.flex,
                    exact=self.exact,
                )
            return batch, part

        batch, part = self._fitting(rows, gradients)
        if check is not None:
            self._conclude(check, metrics)
        if share:
            metrics.loss += part.loss * share
            metrics.kl += part.kl * share
            metrics.entropy += part.entropy * share
            metrics.trained_tokens += part.scored_tokens - metrics.drift_left_out * (check is not None)
            metrics.unique_tokens += batch.unique_tokens
            metrics.total_tokens += batch.total_tokens
        metrics.clipped += part.clipped
        metrics.scored_tokens += part.scored_tokens
        metrics.ratio_max = max(metrics.ratio_max, part.ratio_max)
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_grad_norm))
        if not math.isfinite(norm):
            self._skip(rows, norm, metrics)
            return
        self._skipped.clear()
        metrics.grad_norm = max(metrics.grad_norm, norm)
        self.steps += 1
        self.optimizer.step()
        self.policy.settle()

    def _skip(self, rows: list[Row], norm: float, metrics: UpdateMetrics) -> None:
        """Leave an optimizer step out."""
        metrics.skipped_updates += 1
        self._skipped.append(rows)
        self.note(f"gradient norm {norm}: update skipped, {len(self._skipped)} in a row")
        if len(self._skipped) < MOST_SKIPPED:
            return
        where = ""
        if self.rescue is not None:
            path = self.rescue / "rows_without_gradient.jsonl"
            lines = [{"update": number, **asdict(row)} for number, part in enumerate(self._skipped) for row in part]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            known = sum(bool(part) for part in self._skipped)
            whose = "their rows" if known == MOST_SKIPPED else f"the rows of the last {known}, since the resume,"
            where = f"; {whose} are in {path}"
        raise GradientError(
            f"the gradient was not finite in {MOST_SKIPPED} updates in a row{where}; look at the rows; a "
            "new run may need a lower training.learning_rate"
        )

    def _fitting(self, rows: Sequence[Row], work: Callable[[PackedBatch], T]) -> T:
        """`work` on the packed rows, again with packs half as large whenever memory runs out."""
        splits = is_ours(self.sampler)
        while True:
            batch = pack_rows(rows, self.pack_tokens) if splits else rows_apart(rows)
            try:
                return work(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                problem = " ".join(str(error).split())[:160]
            largest = max(len(pack.ids) for pack in batch.packs)
            if not splits or largest <= LEAST_PACK:
                what = f"packs of up to {largest} tokens"
                if not splits:
                    what = f"rows of up to {largest} tokens, which this model takes whole"
                raise OutOfMemory(
                    f"out of memory with {what}: {problem}; use a smaller model, or a shorter model.context_length"
                )
            self.pack_tokens = max(LEAST_PACK, largest // 2)
            self.note(f"out of memory in the update: going on with training.pack_tokens = {self.pack_tokens}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if torch.backends.mps.is_available():  # torch.accelerator's does not reach it before torch 2.13
                torch.mps.empty_cache()

    def _turn_gaps(self, rows: list[Row]) -> list[float]:
        """Mean of logprob - behaviour over each row's trained tokens, under the present weights: a forward pass."""
        found = zip(rows, self._fitting(rows, self._score), strict=True)
        return [mean_free(row, scored) - mean_free(row, self._behaviour(row)) for row, scored in found]

    def _score(self, batch: PackedBatch) -> list[tuple[float, ...]]:
        """Log-probs under the present weights."""
        return score_rows(self.sampler, self.masks, batch, flex=self.flex, exact=self.exact)

    def _behaviour(self, row: Row) -> tuple[float, ...]:
        """The log-probs a row's ratios are to."""
        return row.logprobs if self.settings.importance_cap is None or row.old is None else row.old

    def _loss(
        self,
        batch: PackedBatch,
        pack: Pack,
        scores: Scores,
        metrics: UpdateMetrics,
        gaps: Sequence[float],
        check: DriftCheck | None,
    ) -> torch.Tensor:
        settings = self.settings
        terms = [pack.terms[number] for number in scores.terms]
        rows = [batch.rows[term.row] for term in terms]

        def tensor(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, device=scores.logprobs.device, dtype=torch.float32)

        def of_token(name: str) -> torch.Tensor | None:
            if getattr(rows[0], name) is None:
                return None
            return tensor([getattr(row, name)[term.position] for row, term in zip(rows, terms, strict=True)])

        drawn, old = of_token("logprobs"), of_token("old")
        assert drawn is not None
        weights = tensor([row.weight for row in rows])
        if check is not None:
            weights = weights * check.compare(
                scores.logprobs.detach(), drawn, [(term.row, term.position) for term in terms]
            )
        corrections = None
        if settings.importance_cap is not None and old is not None:
            pair = (drawn, old)
            if settings.loss == "gspo":  # one weight a turn, as one ratio
                pair = (
                    tensor([mean_free(row, row.logprobs) for row in rows]),
                    tensor([mean_free(row, row.old or ()) for row in rows]),
                )
            corrections = importance_corrections(*pair, settings.importance_cap)
        high = settings.clip_epsilon if settings.clip_epsilon_high is None else settings.clip_epsilon_high
        output = objective(
            LossInputs(
                logprobs=scores.logprobs,
                behaviour=tensor([self._behaviour(row)[term.position] for row, term in zip(rows, terms, strict=True)]),
                advantages=tensor([row.advantage for row in rows]),
                weights=weights,
                reference=of_token("reference"),
                entropies=scores.entropies,
                turn_gaps=tensor([gaps[term.row] for term in terms]) if gaps else None,
                corrections=corrections,
            ),
            surrogate=settings.loss,
            clip=Clip(settings.clip_epsilon, high, settings.dual_clip),
            kl_beta=settings.kl_beta if settings.kl_in == "loss" else 0.0,
            kl_estimate=settings.kl_estimate,
            entropy_beta=settings.entropy_beta,
        )
        metrics.loss += float(output.loss.detach())
        metrics.kl += float(output.kl)
        metrics.entropy += float(output.entropy)
        metrics.scored_tokens += len(terms)
        metrics.clipped += float(output.clipped)
        metrics.ratio_max = max(metrics.ratio_max, float(output.ratio_max))
        return output.loss


def mini_batches(rows: Sequence[Row], count: int, seed: int) -> list[list[Row]]:
    """Deal the trajectories of `rows` to at most `count` shares of like size.

    Weights are multiplied by the number of shares, so that the mean of their gradients is that of the whole batch.
    """
    names = list(dict.fromkeys(row.trajectory for row in rows))
    if count == 1:
        return [list(rows)]
    random.Random(seed).shuffle(names)
    share = {name: index % count for index, name in enumerate(names)}
    parts = [[row for row in rows if share[row.trajectory] == number] for number in range(min(count, len(names)))]
    return [[replace(row, weight=row.weight * len(parts)) for row in part] for part in parts]


def mean_free(row: Row, values: Sequence[float]) -> float:
    """The mean of what belongs to a row's trained tokens."""
    free = [value for value, forced in zip(values, row.forced, strict=True) if not forced]
    return sum(free) / len(free)


def learning_rate(settings: TrainingConfig, step: int) -> float:
    """The rate of step `step` (from 1): linear warm-up, then linear decay to `final_rate` of itself at the last."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / (settings.warmup_steps + 1)
    span = settings.steps - settings.warmup_steps - 1
    done = (step - settings.warmup_steps - 1) / span if span > 0 else 0.0
    return settings.learning_rate * (1 - done * (1 - settings.final_rate))
