"""What every training run shares: sampler and policy, the step loop, evaluation, report and checkpoints.

Invariant: a step's numbers depend only on the recipe, the seed and the weights before it, so a run that was killed and
resumed from its last checkpoint prints the numbers an undisturbed run prints.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from midflight import looping
from midflight.building import assemble, check_prompt_fits, close_all, engines_of, local_engine, toolset_of
from midflight.engines.base import Engine
from midflight.engines.http.usage import difference
from midflight.engines.local import LoadedModel
from midflight.engines.local.batch_invariant import make_batch_invariant
from midflight.engines.local.support import is_ours
from midflight.errors import CannotWrite, TrainingStopped, UserError
from midflight.evaluation import EvaluationResult, Scored, evaluate, summarise, write_plots, write_report
from midflight.evaluation.report import Closing, pick_example, render_report
from midflight.loading import load_named, load_trained, quiet_peft
from midflight.progress import Progress
from midflight.recipe import Recipe, resolved
from midflight.recipe.config import TrainingConfig
from midflight.recipe.engine_rules import asked_at_once, too_slow
from midflight.recipe.own import keep_tools, own_tools
from midflight.recipe.resuming import save_recipe
from midflight.recipe.tool_rules import has_frozen_models
from midflight.rendering import losses
from midflight.rewards import score
from midflight.seeds import derive
from midflight.store import MetricsWriter, NewTrajectory, RunFolder, Store
from midflight.tasks.base import Task
from midflight.tools.base import Tool
from midflight.training.checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from midflight.training.drift import DriftError
from midflight.training.finished import TrainReport
from midflight.training.policy import Policy
from midflight.training.rollouts import check_lost
from midflight.training.step import OutOfMemory, Updater, learning_rate

if TYPE_CHECKING:
    from midflight.engines.vllm import VllmEngine


class Stream(Protocol):
    """What the steps draw from. `success` is its state, kept in checkpoints; their quality is its mean."""

    success: dict[str, float]


class Session(ABC):
    """Everything one run holds. A subclass sets `stream` and says what a step is."""

    stream: Stream

    def __init__(
        self,
        recipe: Recipe,
        settings: TrainingConfig,
        run_dir: Path,
        progress: Progress,
        tools: Sequence[Tool] | None,
        eval_tasks: Sequence[Task],
    ) -> None:
        self.recipe, self.progress, self.settings = recipe, progress, settings
        self.folder, self.eval_tasks = RunFolder(run_dir), eval_tasks
        with ExitStack() as made:  # closed again where a later step fails
            self._make(made, tools)
            made.pop_all()

    def _together(self) -> dict[str, int]:
        """How many trajectories are at once, by the key to set for fewer."""
        return asked_at_once(self.recipe, len(self.eval_tasks))

    def _make(self, made: ExitStack, tools: Sequence[Tool] | None) -> None:
        recipe, progress = self.recipe, self.progress
        toolset = toolset_of(recipe, tools, lambda name: self.frozen if name is None else named.by_name[name])
        made.callback(toolset.close)
        self.own_tools = own_tools(recipe, tools)
        for line in too_slow(recipe, self._together()):
            progress.note(line)
        named = engines_of(recipe, progress.note)
        self.named, self.ledger = named.closing, named.ledger
        made.callback(close_all, named.closing)
        self.ledger.load(self.folder.usage)  # what earlier sessions spent of the budget, before anything is asked
        self.server: VllmEngine | None = None
        if "planner" in named.of:
            from midflight.engines.vllm import VllmEngine

            planner = named.of["planner"]
            assert isinstance(planner, VllmEngine), "engine_rules lets no other engine train"
            self.server = planner
            asyncio.run(planner.check())
        progress.note(f"loading {recipe.model.name}")
        lora = recipe.model.lora
        others = has_frozen_models(recipe)
        with progress.bar("loading sampler and policy", 2, passing=True) as bar, quiet_peft():
            own, root = load_trained(recipe, recipe.model.name, progress.note)
            bar.advance()
            untrained = root == own.name
            self.policy = Policy(
                load_trained(recipe, recipe.model.name, progress.note)[0],
                lora=(lora.rank, lora.alpha) if lora else None,
                reference=self.settings.kl_beta > 0 or (others and untrained),
                seed=derive(recipe.seed, "adapter"),
            )
            bar.advance()
        if self.server is not None:  # its answers train: an id without an embedding ends the update
            self.server.vocabulary = int(own.model.config.vocab_size)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        self.engine = local_engine(recipe, own)
        made.callback(self.engine.close)
        if self.settings.attention == "flex" and not (own.device.type == "cuda" and is_ours(own.model)):
            where = own.device.type if is_ours(own.model) else "its own attention"
            raise UserError(f"training.attention = flex: needs CUDA, the model is on {where}; set it to sdpa")
        whole, most = self.engine.context_length, self.settings.pack_tokens
        if not is_ours(own.model) and most < whole:
            raise UserError(
                f"training.pack_tokens = {most}: a row of this model goes through it whole, and may have {whole} "
                f"tokens; set training.pack_tokens={whole}, or model.context_length={most}"
            )
        exact = is_ours(own.model) and self.server is None and self.settings.attention == "sdpa"
        if exact:
            exact = make_batch_invariant(own.model)
            if lora is None:  # otherwise scores are computed on the sampler's own weights
                make_batch_invariant(self.policy.causal)
        self.updater = Updater(
            self.policy,
            self.optimizer,
            self.engine.model,
            self.engine.masks,
            self.settings,
            exact=exact,
            rescue=self.folder.path,
            note=progress.note,
        )
        self.frozen = None
        if others and untrained:
            backbone = LoadedModel(own.name, self.policy.frozen_model, own.tokenizer, own.device)
            self.frozen = local_engine(recipe, backbone, around=self.policy.frozen)
        elif others:  # the other modules stay what they were when the planner was trained before
            self.frozen = local_engine(recipe, load_named(recipe, root))
        if self.frozen is not None:
            made.callback(self.frozen.close)
        drawing: Engine = self.server or self.engine
        self.train_flow = assemble(recipe, toolset, drawing, self.frozen, training=True, own=named.of)
        self.eval_flow = assemble(recipe, toolset, drawing, self.frozen, training=False, own=named.of)
        check_prompt_fits(recipe, self.train_flow, self.engine)

    def close(self) -> None:
        """End the engines' workers, and what tools hold."""
        self.train_flow.toolset.close()
        self.engine.close()
        if self.frozen is not None:
            self.frozen.close()
        close_all(self.named)

    def _sync(self, step: int) -> None:
        """Give whoever draws the policy's weights, and prove it; a server reads the adapter from the run's folder."""
        self.policy.sync(self.engine, step, bound=self.settings.max_drift)
        if self.server is not None:
            self.policy.sync_server(self.server, self.folder.adapters, step, bound=self.settings.max_drift)

    @property
    def generated_tokens(self) -> int:
        """Drawn by the planner's engine so far."""
        return self.engine.generated_tokens if self.server is None else self.server.generated_tokens

    def _forget(self) -> None:
        for engine in (self.engine, self.frozen):
            if engine is not None:
                engine.forget()

    def _set_rate(self, step: int) -> float:
        """Give the optimizer the learning rate of a step."""
        rate = learning_rate(self.settings, step)
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        return rate

    def run(self, *, resume: bool, evaluate_ends: bool) -> TrainReport:
        started = time.monotonic()
        done = self._resume() if resume else 0
        keep_tools(self.folder, self.own_tools)
        save_recipe(self.recipe, self.folder)
        ask = evaluate_ends and bool(self.eval_tasks)
        with Store(self.folder.store) as store, MetricsWriter(self.folder.metrics) as metrics, ExitStack() as ending:
            ending.callback(self.ledger.save, self.folder.usage)
            known = store.runs()
            if done and not known:
                self.progress.note(f"{store.path} holds no run: what the {done} steps that are done drew is lost")
            run_id = (
                known[-1].id if known else store.start_run(self.recipe.name, resolved(self.recipe), self.recipe.seed)
            )
            store.drop_steps_from(run_id, done + 1)
            records = metrics.go_on(done, store.steps(run_id), self.progress.note)
            earlier = sum(record.get("seconds", 0.0) for record in records)
            self._sync(done)
            before = self._before(store, run_id, done) if ask else None
            walls: list[float] = []
            saved = done
            for step in range(done + 1, self.settings.steps + 1):
                began = time.monotonic()
                spent, moved = self.ledger.to_json(), self.updater.steps
                try:
                    record = self._step(store, run_id, step)
                except CannotWrite:
                    raise
                except (TrainingStopped, DriftError, OutOfMemory):  # the first: in the rollouts
                    if step - 1 > saved and self.updater.steps == moved:  # still the weights of the step before
                        self._save(store, metrics, step - 1)
                    raise
                if self.ledger.of:
                    record["usage"] = difference(self.ledger.to_json(), spent)
                store.finish_step(run_id, step, record)
                metrics.write(record)
                walls.append(time.monotonic() - began)
                left = (self.settings.steps - step) * sum(walls[-5:]) / len(walls[-5:])
                self.progress.step(record, self.settings.steps, left)
                self.ledger.save(self.folder.usage)
                if step % self.settings.save_every == 0 or step == self.settings.steps:
                    self._save(store, metrics, step)
                    saved = step
            after = self._evaluate(store, run_id, "after") if ask else None
            plots = write_plots(self.folder.path)
            seconds = earlier + time.monotonic() - started
            if before is not None and after is not None:
                self._report(store, run_id, before, after, plots, seconds, earlier)
        return TrainReport(self.folder, self.settings.steps, before, after, seconds)

    @abstractmethod
    def _step(self, store: Store, run_id: int, step: int) -> dict[str, Any]:
        """Make step `step`, counted from 1, and sync; returns its metrics record.

        Raises:
            TrainingStopped, DriftError, OutOfMemory: unless the step moved the weights, what was made so far is saved.
        """

    def _before(self, store: Store, run_id: int, done: int) -> EvaluationResult | None:
        """The evaluation before the first step: as it is kept, or made; None where it is lost."""
        file = self.folder.eval_before
        if file.is_file():
            return EvaluationResult.load(file)
        if done == 0:
            return self._evaluate(store, run_id, "before")
        scored = _recorded(store, run_id, "before")
        if not scored:
            self.progress.note(f"{file} is missing, and the store has nothing to make it of: there will be no report")
            return None
        self.progress.note(f"{file} is missing: made again from the store")
        return self._summarised(scored, "before")

    def _evaluate(self, store: Store, run_id: int, phase: str) -> EvaluationResult:
        """Ask the held-out questions."""
        store.drop_phase(run_id, phase)
        settings = self.recipe.evaluation
        finished: list[Scored] = []
        with self.progress.bar(f"evaluating {phase}", len(self.eval_tasks) * settings.trials) as bar:

            def keep(one: Scored) -> None:
                finished.append(one)
                bar.advance()

            try:
                scored = looping.run(
                    evaluate(
                        self.eval_flow,
                        self.eval_tasks,
                        trials=settings.trials,
                        concurrency=settings.concurrency,
                        seed=self.recipe.seed,
                        score=score,
                        on_done=keep,
                    )
                )
            except BaseException:
                kept: Counter[str] = Counter()
                store.add_trajectories(run_id, [_interrupted(one, kept) for one in finished])
                raise
        self.ledger.save(self.folder.usage)
        store.add_trajectories(
            run_id,
            [
                new_trajectory(phase, None, item.task, index % settings.trials, item.trajectory, item.earned, None)
                for index, item in enumerate(scored)
            ],
        )
        check_lost(f"evaluation {phase} training", [item.trajectory for item in scored], self.folder)
        return self._summarised(scored, phase)

    def _summarised(self, scored: Sequence[Scored], phase: str) -> EvaluationResult:
        result = summarise(scored, resamples=self.recipe.evaluation.bootstrap, seed=self.recipe.seed)
        if result.infrastructure:
            lost = losses(result.infrastructure, result.n, result.infrastructure_reasons)
            self.progress.note(f"evaluation {phase} training: {lost}")
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
        of_earlier: float,
    ) -> None:
        earlier, later = (_recorded(store, run_id, phase) for phase in ("before", "after"))
        question = next((item.task.question for item in later if item.task.level >= 3), later[0].task.question)
        closing = Closing(
            str(self.folder.path),
            self.settings.steps,
            seconds,
            of_earlier,
            [plot.name for plot in plots],
            question,
            self.own_tools,
        )
        text = render_report(
            before,
            after,
            title=f"{self.recipe.name}, seed {self.recipe.seed}: held-out questions before and after training",
            example=pick_example(earlier, later),
            closing=closing.lines(self.folder),
        )
        write_report(self.folder, before, after, text, closing)

    def _save(self, store: Store, metrics: MetricsWriter, step: int) -> None:
        """Write a checkpoint; no step that it has done is missing from store or metrics."""
        store.to_disk()
        metrics.to_disk()
        success = self.stream.success
        save_checkpoint(
            self.folder.checkpoints,
            self.policy,
            self.optimizer,
            step=step,
            quality=sum(success.values()) / max(len(success), 1),
            state={
                "success": success,
                "base": self.policy.base_name,
                "skipped_in_a_row": self.updater.skipped_in_a_row,
                "pack_tokens": self.updater.pack_tokens,
            },
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
        self.updater.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))  # older checkpoints have neither
        self.updater.pack_tokens = int(state.get("pack_tokens", self.settings.pack_tokens))
        self.progress.note(f"resuming {self.folder.path} after step {state['step']}")
        return int(state["step"])


def _recorded(store: Store, run_id: int, phase: str) -> list[Scored]:
    return [Scored(item.task, item.trajectory, item.reward or 0.0) for item in store.trajectories(run_id, phase)]


def _interrupted(one: Scored, before: Counter[str]) -> NewTrajectory:
    """A trajectory of an evaluation that did not end; `before` counts those of each question."""
    member = before[one.task.id]
    before[one.task.id] += 1
    return new_trajectory("interrupted", None, one.task, member, one.trajectory, one.earned, None)


def new_trajectory(
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
