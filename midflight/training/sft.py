"""Supervised training of the planner on recorded trajectories: rejection-sampled from a run, or a stronger planner's.

The loss is the mean over trajectories of the mean over turns of the mean over tokens of -log p, p under the grammar at
temperature 1 (`training.weighting` says what else can count alike), and `kl_beta` holds the planner near its start.
Invariant: the batches follow from seed and step alone, so a resumed run prints the numbers of an undisturbed one.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from midflight.errors import UserError
from midflight.evaluation.held_out import listed_tasks
from midflight.progress import Progress
from midflight.recipe import Recipe
from midflight.recipe.own import own_tools
from midflight.recipe.resuming import check_run_folder
from midflight.recipe.rules import check_schedule
from midflight.seeds import derive
from midflight.store import RunFolder, Store
from midflight.tasks.base import Task
from midflight.tools.base import Tool
from midflight.training.conduct import conduct
from midflight.training.demonstrations import HELD_OUT, Selection, Wanted, keep, kept, same_question, select
from midflight.training.finished import TrainReport, finished
from midflight.training.packing import Row
from midflight.training.replay import Demonstration, NotShowable, replay
from midflight.training.returns import Place, weighted_rows
from midflight.training.rollouts import Group
from midflight.training.session import Session

RECORDED = (
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "trained_tokens",
    "unique_tokens",
    "total_tokens",
    "skipped_updates",
    "pack_tokens",
)
"""Of an update's metrics, those that mean something without a sampler."""


def sft(
    recipe: Recipe,
    run_dir: Path,
    wanted: Wanted | None,
    *,
    progress: Progress | None = None,
    evaluate_ends: bool = True,
    tools: Sequence[Tool] | None = None,
    eval_tasks: Sequence[Task] | None = None,
) -> TrainReport:
    """Train the planner of `recipe` on demonstrations, into `run_dir`; see `midflight.training.trainer.train`.

    Args:
        wanted: which trajectories to learn from; None goes on from the newest checkpoint with those the run keeps.

    Raises:
        UserError: something given is wrong, or nothing is left to learn from; nothing was done.
        TrainingStopped: the gradient is not finite, memory ran out, a sync went wrong, the run cannot be written, the
            budget is spent, or an evaluation lost all its trajectories to the infrastructure.
        KeyboardInterrupt: interrupted; the last checkpoint is kept.
    """
    check_run_folder(run_dir, recipe, resume=wanted is None, command="sft", own_tools=own_tools(recipe, tools))
    progress = progress or Progress()
    done = finished(RunFolder(run_dir), progress) if wanted is None else None
    if done is not None:
        return done
    held_out = listed_tasks(recipe.eval_tasks) if eval_tasks is None else list(eval_tasks)
    selection = kept(RunFolder(run_dir)) if wanted is None else select(wanted, recipe, held_out)
    if selection.left_out[HELD_OUT]:
        progress.note(
            f"LEFT OUT: {selection.left_out[HELD_OUT]} trajectories ask questions of eval_tasks; who learns their "
            "answers cannot be evaluated on them"
        )
    limit = None if wanted is None else wanted.per_question
    trainer = SupervisedTrainer(recipe, run_dir, progress, tools, held_out, selection, limit)
    progress.note(f"demonstrations: {trainer.selection.line()}")
    if wanted is None and trainer.selection.left_out:
        raise UserError(f"--resume: the demonstrations of {run_dir} do not all replay; start again with --from")

    def keep_demonstrations() -> None:
        assert wanted is not None, "a new run was given what it learns from"
        keep(trainer.folder, recipe, wanted, trainer.selection)

    return conduct(trainer, resume=wanted is None, evaluate_ends=evaluate_ends, keep=keep_demonstrations)


@dataclass
class Demonstrations:
    """Demonstrations in shuffled passes.

    `success` holds exp(-loss) of the last batch whose loss was a number, the checkpoint's quality.
    """

    shown: Sequence[Demonstration]
    batch_size: int
    seed: int
    success: dict[str, float] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Of one pass; the last may be smaller."""
        return math.ceil(len(self.shown) / self.batch_size)

    def batch(self, step: int) -> list[Demonstration]:
        """The batch of step `step`, counted from 1 over all passes."""
        epoch, number = divmod(step - 1, self.batches)
        order = random.Random(derive(self.seed, "demonstrations", epoch)).sample(self.shown, len(self.shown))
        return order[number * self.batch_size : (number + 1) * self.batch_size]


class SupervisedTrainer(Session):
    """A supervised run. Use `sft`."""

    stream: Demonstrations

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        progress: Progress,
        tools: Sequence[Tool] | None,
        eval_tasks: Sequence[Task],
        selection: Selection,
        per_question: int | None,
    ) -> None:
        one_pass = {"loss": "reinforce", "overlong": "keep", "importance_cap": None, "epochs": 1, "mini_batches": 1}
        settings = recipe.training.model_copy(update=one_pass)
        super().__init__(recipe, settings, run_dir, progress, tools, eval_tasks)
        with ExitStack() as made:  # as in `Session`
            made.callback(self.close)
            self.selection, shown = self._replayed(selection, per_question)
            self.stream = Demonstrations(shown, recipe.sft.batch_size, recipe.seed)
            steps = recipe.sft.epochs * self.stream.batches
            check_schedule(settings, steps, f"{len(shown)} demonstrations make {steps} steps")
            self.settings = settings.model_copy(update={"steps": steps})
            made.pop_all()

    def _replayed(self, selection: Selection, per_question: int | None) -> tuple[Selection, list[Demonstration]]:
        """The demonstrations among the selection's records, at most `per_question` of one question."""
        shown: dict[int, Demonstration] = {}
        reasons: dict[int, str] = {}
        for index, record in enumerate(selection.records):
            try:
                shown[index] = replay(record.task, record.trajectory, self.train_flow, self.engine)
            except NotShowable as error:
                reasons[index] = str(error)
        taken: Counter[str] = Counter()
        for index in sorted(shown, key=lambda index: shown[index].length):
            question = same_question(selection.records[index].task.question)
            taken[question] += 1
            if per_question is not None and taken[question] > per_question:
                reasons[index] = "over --per-question"
        left = selection.without(reasons.get(index) for index in range(len(selection.records)))
        return left, [one for index, one in shown.items() if index not in reasons]

    def _step(self, store: Store, run_id: int, step: int) -> dict[str, Any]:
        began = time.monotonic()
        batch = self.stream.batch(step)
        rows = self._rows(batch)
        rate = self._set_rate(step)
        with self.progress.bar(f"step {step}/{self.settings.steps}: update", 1, passing=True):
            if self.settings.kl_beta > 0:
                rows = self.updater.with_reference(rows)
            measured = self.updater.update(rows, drawn=False)
        self._sync(step)
        if math.isfinite(measured.loss):  # else the update was skipped: the weights are as they were
            self.stream.success = {"demonstrations": math.exp(-measured.loss)}
        record = {
            "step": step,
            "epoch": (step - 1) // self.stream.batches + 1,
            "demonstrations": len(batch),
            **{name: value for name, value in measured.record().items() if name in RECORDED},
            "learning_rate": rate,
            "seconds": time.monotonic() - began,
        }
        return record

    def _rows(self, batch: Sequence[Demonstration]) -> list[Row]:
        """The rows of a batch, each trajectory being its own group: the weights are those of rollouts."""
        groups = [Group(one.task, (one.trajectory,), (1.0,)) for one in batch]
        rows = {
            Place(number, 0, turn): replace(row, trajectory=number)
            for number, one in enumerate(batch)
            for turn, row in enumerate(one.rows)
        }
        return weighted_rows(groups, rows, [[[1.0] * len(one.rows)] for one in batch], self.settings)
