"""The trainer's own update, and all that the benchmark takes from `midflight.training`.

Invariant: every repeat is the same update. The optimizer's rate is 0, so the weights stay what they were, while all
of its work is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch

from midflight.engines.local.batch_invariant import make_batch_invariant
from midflight.engines.local.grammar import Masks
from midflight.errors import UserError
from midflight.loading import load_named, quiet_peft
from midflight.recipe import Recipe
from midflight.recipe.config import TrainingConfig
from midflight.seeds import derive
from midflight.store import TrajectoryRecord
from midflight.training.packing import PackedBatch, Row, pack_rows
from midflight.training.policy import Policy
from midflight.training.returns import advantages, rows_of, weighted_rows
from midflight.training.rollouts import Group
from midflight.training.step import Updater
from midflight.training.trainer import train
from midflight.training.update import score_rows

UP_STD = 0.01
"""Deviation of the adapter's second factor, which starts at 0: there the first gets no gradient to compare."""

PLAIN: dict[str, Any] = {
    "epochs": 1,
    "mini_batches": 1,
    "loss": "ppo_clip",
    "clip_epsilon_high": None,
    "dual_clip": None,
    "importance_cap": None,
    "kl_beta": 0.0,
    "entropy_beta": 0.0,
}
"""What is compared is one optimizer step on clipped ratios, whatever else the recipe adds to it."""


@dataclass(frozen=True)
class Bench:
    """What an update needs. `sampler` holds the weights of `policy`; `settings` are the recipe's, less `PLAIN`.

    `exact` is whether the trainer computes so, as it does in float32 on the CPU.
    """

    policy: Policy
    sampler: Any
    masks: Masks
    optimizer: torch.optim.Optimizer
    settings: TrainingConfig
    exact: bool

    def gradients(self) -> torch.Tensor:
        """All gradients of the last update as one vector."""
        parts = (parameter.grad for parameter in self.policy.parameters())
        return torch.cat([part.flatten() for part in parts if part is not None])

    @contextmanager
    def merged(self) -> Iterator[Any]:
        """The model the trainer computes losses on: merged weights, gradients sent to the adapter."""
        with self.policy.scoring(self.sampler) as model:
            yield model

    @contextmanager
    def unmerged(self) -> Iterator[Any]:
        """The model as PEFT has it."""
        yield self.policy.causal


def load_bench(recipe: Recipe) -> Bench:
    """The recipe's model with a fresh adapter, and its sampler.

    Raises:
        UserError: the recipe trains all weights; all ways compared here train an adapter.
    """
    lora = recipe.model.lora
    if lora is None:
        raise UserError("model.lora: this benchmark compares updates of an adapter; set model.lora.rank=16")
    with quiet_peft():
        own = load_named(recipe, recipe.model.name)
        policy = Policy(
            load_named(recipe, recipe.model.name),
            lora=(lora.rank, lora.alpha),
            reference=False,
            seed=derive(recipe.seed, "adapter"),
        )
    with torch.no_grad():
        for name, parameter in policy.causal.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=UP_STD)
    policy.write(own.model)
    settings = recipe.training.model_copy(update=PLAIN)
    return Bench(
        policy=policy,
        sampler=own.model,
        masks=Masks(own.tokenizer, int(own.model.config.vocab_size)),
        optimizer=torch.optim.AdamW(policy.parameters(), lr=0.0, betas=settings.betas, weight_decay=0.0),
        settings=settings,
        exact=make_batch_invariant(own.model),
    )


def packed(rows: Sequence[Row], settings: TrainingConfig) -> PackedBatch:
    """The rows as the trainer packs them."""
    return pack_rows(rows, settings.pack_tokens)


def packed_update(bench: Bench, rows: Sequence[Row], **changes: Any) -> None:
    """Pack, forward, backward, clip, optimizer step; `changes` are to the training settings."""
    settings = bench.settings.model_copy(update=changes)
    note = partial(print, file=sys.stderr)
    updater = Updater(bench.policy, bench.optimizer, bench.sampler, bench.masks, settings, exact=bench.exact, note=note)
    updater.update(rows)


def on_policy(bench: Bench, rows: Sequence[Row]) -> list[Row]:
    """The rows with the behaviour log-probs that the bench's own weights give, so that all ratios are 1."""
    found = score_rows(bench.sampler, bench.masks, packed(rows, bench.settings), exact=bench.exact)
    return [replace(row, logprobs=values) for row, values in zip(rows, found, strict=True)]


def trunk_length(rows: Sequence[Row]) -> int:
    """How many tokens all prompts begin with, short of a whole prompt."""
    prompts = [row.prompt_ids for row in rows]
    return len(commonprefix([prompt[:-1] for prompt in prompts]))


def rows_trained(records: Iterable[TrajectoryRecord], settings: TrainingConfig) -> list[Row]:
    """The rows of a step from its stored trajectories, which stand group by group, members from 0."""
    groups: list[list[TrajectoryRecord]] = []
    for record in records:
        if record.member == 0:
            groups.append([])
        groups[-1].append(record)
    found = [
        Group(members[0].task, tuple(one.trajectory for one in members), tuple(one.reward for one in members))
        for members in groups
    ]
    rows = rows_of(found)
    return weighted_rows(found, rows, advantages(found, settings, rows), settings)


def train_one_step(recipe: Recipe, folder: Path) -> None:
    """The first step of `recipe` as a run in `folder`."""
    once = recipe.training.model_copy(update={"steps": 1})
    train(recipe.model_copy(update={"training": once}), folder, evaluate_ends=False)
