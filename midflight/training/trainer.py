"""The trainer: rollouts in the live agent, rewards, advantages, one update, fresh weights to the sampler, again.

Invariant: a step's numbers depend only on the recipe, the seed and the weights before it, so a run that was killed and
resumed from its last checkpoint prints the numbers an undisturbed run prints.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from midflight.agent.types import Trajectory
from midflight.building import (
    assemble,
    check_prompt_fits,
    load_named,
    local_engine,
    quiet_peft,
    toolset_of,
)
from midflight.config import Recipe, resolved
from midflight.engines.local import LoadedModel
from midflight.errors import NO_ROOM, CannotWrite, TrainingStopped
from midflight.evaluating import file_tasks, listed_tasks
from midflight.evaluation import EvaluationResult, Scored, evaluate, summarise, write_plots, write_report
from midflight.evaluation.report import pick_example, render_report
from midflight.progress import Bar, Progress
from midflight.resuming import check_run_folder, save_recipe
from midflight.rewards import score
from midflight.seeds import derive
from midflight.store import MetricsWriter, NewTrajectory, RunFolder, Store
from midflight.tasks.base import Task
from midflight.tools.base import Tool
from midflight.training.advantages import Placed
from midflight.training.checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from midflight.training.data import ListSource, Source, TaskStream, atlas_source
from midflight.training.measures import step_record
from midflight.training.policy import Policy, SyncError
from midflight.training.returns import advantages, carries_signal, rows_of, weighted_rows
from midflight.training.rollouts import Group, collect
from midflight.training.step import DriftError, GradientError, OutOfMemory, UpdateMetrics, Updater, learning_rate


@dataclass(frozen=True)
class TrainReport:
    """What a run gave. `before` and `after` are None without held-out questions."""

    folder: RunFolder
    steps: int
    before: EvaluationResult | None
    after: EvaluationResult | None
    seconds: float


def train(
    recipe: Recipe,
    run_dir: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    evaluate_ends: bool = True,
    tools: Sequence[Tool] | None = None,
    tasks: Sequence[Task] | None = None,
    eval_tasks: Sequence[Task] | None = None,
) -> TrainReport:
    """Train the planner as `recipe` says, into `run_dir`.

    Args:
        recipe: what to do.
        run_dir: the run's folder.
        resume: go on from its newest checkpoint.
        progress: where to show it; standard error by default.
        evaluate_ends: ask the held-out questions before the first step and after the last.
        tools: the caller's own tools that the recipe names.
        tasks: the caller's own training questions, instead of `recipe.train_tasks`.
        eval_tasks: likewise for `recipe.eval_tasks`.

    Raises:
        UserError: something given is wrong; nothing was done.
        TrainingStopped: sampler and trainer disagree, the gradient is not finite, memory ran out, or the run cannot be
            written.
        KeyboardInterrupt: interrupted; finished trajectories of the step and the last checkpoint are kept.
    """
    check_run_folder(run_dir, recipe, resume=resume)
    trainer = Trainer(recipe, run_dir, progress or Progress(), tools, tasks, eval_tasks)
    try:
        return trainer.run(resume=resume, evaluate_ends=evaluate_ends)
    except (DriftError, SyncError, GradientError, OutOfMemory) as error:
        raise TrainingStopped(str(error)) from error
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise CannotWrite(Path(error.filename or run_dir), error) from error
    finally:
        trainer.close()


class Trainer:
    """Everything one run holds. Use `train`."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        progress: Progress,
        tools: Sequence[Tool] | None,
        tasks: Sequence[Task] | None,
        eval_tasks: Sequence[Task] | None,
    ) -> None:
        self.recipe, self.progress = recipe, progress
        self.settings = recipe.training
        self.folder = RunFolder(run_dir)
        if eval_tasks is not None or tasks is not None:
            self.eval_tasks = list(eval_tasks or ())
        else:
            self.eval_tasks = listed_tasks(recipe.eval_tasks)
        self.stream = TaskStream(_source(recipe, tasks), recipe.seed, self.settings.curriculum)
        toolset = toolset_of(recipe, tools)
        progress.note(f"loading {recipe.model.name}")
        lora = recipe.model.lora
        others = recipe.agent.has_frozen_models
        with progress.bar("loading sampler and policy", 2, passing=True) as bar, quiet_peft():
            own = load_named(recipe, recipe.model.name)
            bar.advance()
            self.policy = Policy(
                load_named(recipe, recipe.model.name),
                lora=(lora.rank, lora.alpha) if lora else None,
                reference=self.settings.kl_beta > 0 or others,
                seed=derive(recipe.seed, "adapter"),
            )
            bar.advance()
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        self.engine = local_engine(recipe, own)
        self.updater = Updater(
            self.policy,
            self.optimizer,
            self.engine.model,
            self.engine.masks,
            self.settings,
            rescue=run_dir,
            note=progress.note,
        )
        self.frozen = None
        if others:
            backbone = LoadedModel(own.name, self.policy.frozen_model, own.tokenizer, own.device)
            self.frozen = local_engine(recipe, backbone, around=self.policy.frozen)
        self.train_flow = assemble(recipe, toolset, self.engine, self.frozen, training=True)
        self.eval_flow = assemble(recipe, toolset, self.engine, self.frozen, training=False)
        check_prompt_fits(recipe, self.train_flow, self.engine)

    def close(self) -> None:
        """End the engines' workers."""
        self.engine.close()
        if self.frozen is not None:
            self.frozen.close()

    def _forget(self) -> None:
        for engine in (self.engine, self.frozen):
            if engine is not None:
                engine.forget()

    def run(self, *, resume: bool, evaluate_ends: bool) -> TrainReport:
        started = time.monotonic()
        done = self._resume() if resume else 0
        self.folder.create()
        save_recipe(self.recipe, self.folder)
        ask = evaluate_ends and bool(self.eval_tasks)
        with Store(self.folder.store) as store, MetricsWriter(self.folder.metrics) as metrics:
            known = store.runs()
            run_id = (
                known[-1].id if known else store.start_run(self.recipe.name, resolved(self.recipe), self.recipe.seed)
            )
            store.drop_steps_from(run_id, done + 1)
            metrics.truncate_from(done + 1)
            self.policy.sync(self.engine, done, bound=self.settings.max_drift)
            before = None
            if ask and self.folder.eval_before.is_file():
                before = EvaluationResult.load(self.folder.eval_before)
            elif ask and done == 0:
                before = self._evaluate(store, run_id, "before")
            walls: list[float] = []
            for step in range(done + 1, self.settings.steps + 1):
                began = time.monotonic()
                record = self._step(store, run_id, step)
                metrics.write(record)
                walls.append(time.monotonic() - began)
                left = (self.settings.steps - step) * sum(walls[-5:]) / len(walls[-5:])
                self.progress.step(record, self.settings.steps, left)
                if step % self.settings.save_every == 0 or step == self.settings.steps:
                    store.to_disk()
                    metrics.to_disk()
                    self._save(step)  # so that no step a checkpoint has done is missing from either
            after = self._evaluate(store, run_id, "after") if ask else None
            plots = write_plots(self.folder.path)
            if before is not None and after is not None:
                self._report(store, run_id, before, after, plots, time.monotonic() - started)
        return TrainReport(self.folder, self.settings.steps, before, after, time.monotonic() - started)

    def _step(self, store: Store, run_id: int, step: int) -> dict[str, Any]:
        began = time.monotonic()
        self._forget()  # a step begins with empty prefix trees, as after a resume: the same rounding
        tokens = self.engine.generated_tokens
        number = f"step {step}/{self.settings.steps}"
        with self.progress.bar(
            f"{number}: rollouts", self.settings.most_queries * self.settings.group_size, passing=True
        ) as bar:
            groups = asyncio.run(self._rollouts(store, run_id, step, bar))
        rolled = time.monotonic()
        drawn = self.engine.generated_tokens - tokens
        self._forget()  # the memory is the update's now
        rate = learning_rate(self.settings, step)
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        with self.progress.bar(f"{number}: update", 1, passing=True):
            placed, measured = self._update(store, run_id, step, groups)
        rewards: dict[str, list[float]] = {}
        for group in groups:
            rewards.setdefault(group.task.kind, []).extend(reward for _, reward in group.scored)
        self.stream.update({kind: values for kind, values in rewards.items() if values})
        ended = time.monotonic()
        record = {
            **step_record(step, groups, placed),
            **measured.record(),
            "learning_rate": rate,
            "success": dict(self.stream.success),
            "generated_tokens": drawn,
            "tokens_per_second": drawn / (rolled - began),
            "seconds": ended - began,
            "seconds_rollout": rolled - began,
            "seconds_update": ended - rolled,
        }
        store.finish_step(run_id, step, record)
        return record

    def _update(
        self, store: Store, run_id: int, step: int, groups: Sequence[Group]
    ) -> tuple[list[Placed], UpdateMetrics]:
        """Advantages, stored before the weights move; then the update of what carries signal, and the sync."""
        settings = self.settings
        rows = rows_of(groups)
        if settings.kl_beta > 0 and settings.kl_in == "reward" and rows:
            rows = dict(zip(rows, self.updater.with_reference(list(rows.values())), strict=True))
        placed = advantages(groups, settings, rows)
        store.add_trajectories(run_id, _stored(groups, step, placed))
        training = weighted_rows(groups, rows, placed, settings)
        if not training:
            return placed, UpdateMetrics()
        if settings.kl_beta > 0 and settings.kl_in == "loss":
            training = self.updater.with_reference(training)
        seed = derive(self.recipe.seed, "mini-batches", step)
        measured = self.updater.update(training, version=self.engine.weights_version, seed=seed)
        self.policy.sync(self.engine, step, bound=settings.max_drift)
        return placed, measured

    async def _rollouts(self, store: Store, run_id: int, step: int, bar: Bar) -> list[Group]:
        """The step's groups; while too few have signal, more are drawn up to the cap."""
        wanted = self.settings.queries_per_step
        cap = self.settings.most_queries
        groups: list[Group] = []
        finished: list[NewTrajectory] = []

        def keep(task: Task, member: int, trajectory: Trajectory, reward: float | None) -> None:
            finished.append(_new("interrupted", step, task, member, trajectory, reward, None))
            bar.advance()

        try:
            while len(groups) < cap:
                missing = wanted - sum(carries_signal(group, self.settings) for group in groups)
                count = min(missing, cap - len(groups))
                if count <= 0:
                    break
                tasks = self.stream.draw(step, len(groups), count)
                seed = derive(self.recipe.seed, "rollouts", step, len(groups))
                groups += await collect(self.train_flow, tasks, self.settings.group_size, score, seed, keep)
        except (asyncio.CancelledError, KeyboardInterrupt):
            store.add_trajectories(run_id, finished)
            raise
        return groups

    def _evaluate(self, store: Store, run_id: int, phase: str) -> EvaluationResult:
        """Ask the held-out questions."""
        store.drop_phase(run_id, phase)
        settings = self.recipe.evaluation
        with self.progress.bar(f"evaluating {phase}", len(self.eval_tasks) * settings.trials) as bar:
            scored = asyncio.run(
                evaluate(
                    self.eval_flow,
                    self.eval_tasks,
                    trials=settings.trials,
                    concurrency=settings.concurrency,
                    seed=self.recipe.seed,
                    score=score,
                    on_done=lambda _: bar.advance(),
                )
            )
        store.add_trajectories(
            run_id,
            [
                _new(phase, None, item.task, index % settings.trials, item.trajectory, item.reward, None)
                for index, item in enumerate(scored)
            ],
        )
        result = summarise(scored, resamples=settings.bootstrap, seed=self.recipe.seed)
        result.save(self.folder.eval_before if phase == "before" else self.folder.eval_after)
        return result

    def _report(
        self,
        store: Store,
        run_id: int,
        before: EvaluationResult,
        after: EvaluationResult,
        plots: Sequence[Path],
        seconds: float,
    ) -> None:
        earlier, later = (
            [Scored(item.task, item.trajectory, item.reward or 0.0) for item in store.trajectories(run_id, phase)]
            for phase in ("before", "after")
        )
        question = next((item.task.question for item in later if item.task.level >= 3), later[0].task.question)
        text = render_report(
            before,
            after,
            title=f"{self.recipe.name}, seed {self.recipe.seed}: held-out questions before and after training",
            example=pick_example(earlier, later),
            closing=[
                f"took {seconds:.0f} s",
                f"run folder: {self.folder.path}",
                f"plots: {self.folder.plots} ({', '.join(plot.name for plot in plots)})",
                f'try next: midflight solve "{question}" --model {self.folder.path}',
            ],
        )
        write_report(self.folder, before, after, text)

    def _save(self, step: int) -> None:
        success = self.stream.success
        save_checkpoint(
            self.folder.checkpoints,
            self.policy,
            self.optimizer,
            step=step,
            quality=sum(success.values()) / max(len(success), 1),
            state={"success": success, "base": self.policy.base_name},
            keep_last=self.settings.keep_last,
            keep_best=self.settings.keep_best,
        )

    def _resume(self) -> int:
        """Restore the newest whole checkpoint; 0 when the run was stopped before its first."""
        newest = newest_checkpoint(self.folder.checkpoints, self.progress.note)
        if newest is None:
            self.progress.note(f"{self.folder.path} has no checkpoint yet: starting at step 1")
            return 0
        state = load_checkpoint(newest, self.policy, self.optimizer)
        self.stream.success = dict(state["success"])
        self.progress.note(f"resuming {self.folder.path} after step {state['step']}")
        return int(state["step"])


def _source(recipe: Recipe, tasks: Sequence[Task] | None) -> Source:
    wanted = recipe.train_tasks
    if tasks is not None:
        return ListSource(tasks)
    if wanted.family == "atlas":
        return atlas_source(wanted.split, wanted.kinds)
    return ListSource(file_tasks(wanted))


def _new(
    phase: str,
    step: int | None,
    task: Task,
    member: int,
    trajectory: Any,
    reward: float | None,
    advantage: float | None,
) -> NewTrajectory:
    return NewTrajectory(
        phase=phase,
        step=step,
        group=task.id,
        member=member,
        task=task,
        trajectory=trajectory,
        reward=reward,
        advantage=advantage,
    )


def _stored(groups: Sequence[Group], step: int, placed: Sequence[Placed]) -> list[NewTrajectory]:
    """Each with its advantage: the mean over its turns, which all have the same but under `gigpo`."""
    made = []
    for group, turns_of in zip(groups, placed, strict=True):
        values = iter(turns_of)
        for member, (trajectory, reward) in enumerate(zip(group.trajectories, group.rewards, strict=True)):
            advantage = None
            if reward is not None:
                turns = next(values)
                advantage = fmean(turns) if turns else None
            made.append(_new("train", step, group.task, member, trajectory, reward, advantage))
    return made
