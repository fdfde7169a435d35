"""The trainer: rollouts in the live agent, rewards, advantages, one update, fresh weights to the sampler, again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from midflight import looping
from midflight.agent.types import Trajectory
from midflight.evaluation.held_out import file_tasks, listed_tasks
from midflight.evaluation.statistics import lost_to_infrastructure
from midflight.progress import Bar, Progress
from midflight.recipe import Recipe
from midflight.recipe.own import keep_tasks, own_tools, with_own_tasks
from midflight.recipe.resuming import check_run_folder
from midflight.rewards import score
from midflight.seeds import derive
from midflight.store import NewTrajectory, RunFolder, Store
from midflight.tasks.base import Task
from midflight.tools.base import Tool
from midflight.training.advantages import Placed
from midflight.training.conduct import conduct
from midflight.training.data import ListSource, Source, TaskStream, atlas_source
from midflight.training.finished import TrainReport, finished
from midflight.training.measures import step_record
from midflight.training.returns import advantages, rows_of, weighted_rows, with_signal
from midflight.training.rollouts import Group, check_lost, collect
from midflight.training.session import Session, new_trajectory
from midflight.training.step import UpdateMetrics


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
        tasks: the caller's own training questions, instead of `recipe.train_tasks`; the run's folder keeps them.
        eval_tasks: likewise for `recipe.eval_tasks`.

    Raises:
        UserError: something given is wrong; nothing was done.
        TrainingStopped: sampler and trainer disagree, the gradient is not finite, memory ran out, the run cannot be
            written, the budget is spent, or a step or an evaluation lost all its trajectories to the infrastructure.
        KeyboardInterrupt: interrupted; finished trajectories of the step and the last checkpoint are kept.
    """
    progress, folder = progress or Progress(), RunFolder(run_dir)
    recipe = with_own_tasks(recipe, folder, tasks, eval_tasks)
    check_run_folder(run_dir, recipe, resume=resume, own_tools=own_tools(recipe, tools))
    if resume:
        keep_tasks(folder, tasks, eval_tasks, resume=True)
        done = finished(folder, progress)
        if done is not None:
            return done
    trainer = Trainer(recipe, run_dir, progress, tools, tasks, eval_tasks)
    return conduct(
        trainer,
        resume=resume,
        evaluate_ends=evaluate_ends,
        keep=lambda: keep_tasks(folder, tasks, eval_tasks, resume=False),
    )


class Trainer(Session):
    """A Flow-GRPO run. Use `train`."""

    stream: TaskStream

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        progress: Progress,
        tools: Sequence[Tool] | None,
        tasks: Sequence[Task] | None,
        eval_tasks: Sequence[Task] | None,
    ) -> None:
        if eval_tasks is not None or tasks is not None:
            held_out = list(eval_tasks or ())
        else:
            held_out = listed_tasks(recipe.eval_tasks)
        training = recipe.training
        source = _source(recipe, tasks)
        self.stream = TaskStream(source, recipe.seed, training.curriculum, training.most_queries)
        super().__init__(recipe, recipe.training, run_dir, progress, tools, held_out)

    def _together(self) -> dict[str, int]:
        rollouts = self.settings.queries_per_step * self.settings.group_size
        return super()._together() | {"training.queries_per_step x group_size": rollouts}

    def _step(self, store: Store, run_id: int, step: int) -> dict[str, Any]:
        began = time.monotonic()
        self._forget()  # a step begins with empty prefix trees, as after a resume: the same rounding
        tokens = self.generated_tokens
        number = f"step {step}/{self.settings.steps}"
        with self.progress.bar(
            f"{number}: rollouts", self.settings.most_queries * self.settings.group_size, passing=True
        ) as bar:
            self.engine.exact = self.updater.exact
            groups = looping.run(self._rollouts(store, run_id, step, bar))
            self.engine.exact = False  # evaluation has more rows in memory, and nothing to agree with
        rolled = time.monotonic()
        drawn = self.generated_tokens - tokens
        self._forget()  # the memory is the update's now
        rate = self._set_rate(step)
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
        self._sync(step)
        return placed, measured

    async def _rollouts(self, store: Store, run_id: int, step: int, bar: Bar) -> list[Group]:
        """The step's groups; while too few would train, more are drawn up to the cap."""
        wanted = self.settings.queries_per_step
        cap = self.settings.most_queries
        groups: list[Group] = []
        finished: list[NewTrajectory] = []
        late = asyncio.Event()
        seconds = self.settings.rollout_seconds
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, late.set)

        def keep(task: Task, member: int, trajectory: Trajectory, reward: float | None) -> None:
            finished.append(new_trajectory("interrupted", step, task, member, trajectory, reward, None))
            bar.advance()

        try:
            while len(groups) < cap and not late.is_set():
                missing = wanted - with_signal(groups, self.settings)
                count = min(missing, cap - len(groups))
                if count <= 0:
                    break
                tasks = self.stream.draw(step, len(groups), count)
                seed = derive(self.recipe.seed, "rollouts", step, len(groups))
                cancel = None if timer is None else late
                drawn = await collect(self.train_flow, tasks, self.settings.group_size, score, seed, keep, cancel)
                groups += drawn
                if lost_to_infrastructure({one.stop_reason for group in drawn for one in group.trajectories}):
                    break  # engines on servers have tried again themselves
            check_lost(f"step {step}", [one for group in groups for one in group.trajectories], self.folder)
        except BaseException:
            store.add_trajectories(run_id, finished)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return groups


def _source(recipe: Recipe, tasks: Sequence[Task] | None) -> Source:
    wanted = recipe.train_tasks
    if tasks is not None:
        return ListSource(tasks, recipe.seed)
    if wanted.family == "atlas":
        return atlas_source(wanted.split, wanted.kinds)
    return ListSource(file_tasks(wanted), recipe.seed)


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
            made.append(new_trajectory("train", step, group.task, member, trajectory, reward, advantage))
    return made
