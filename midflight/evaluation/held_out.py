"""`midflight eval`: a recipe's held-out questions, asked of one model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from midflight import looping
from midflight.errors import UserError
from midflight.evaluation.report import comparison_table
from midflight.evaluation.runner import evaluate
from midflight.evaluation.statistics import Scored, summarise
from midflight.progress import Progress
from midflight.recipe import Recipe
from midflight.recipe.config import HeldOutTasks, TaskSource
from midflight.recipe.engine_rules import asked_at_once, too_slow
from midflight.recipe.rules import is_task_file
from midflight.rewards import score
from midflight.tasks import Task, atlas_tasks, load_tasks


def evaluate_model(
    recipe: Recipe, model: str | None, progress: Progress, keep: Path | None = None
) -> tuple[str, dict[str, Any]]:
    """Ask every question; returns the table as text and all figures as plain data.

    `model` is the planner's; None where the recipe names an engine for it. Where nothing was scored the accuracies are
    None and by kind and level there are none. `keep` is a new file for the trajectories, see `trajectory_line`.

    Raises:
        UserError: there is no question, or `keep` is there already.
    """
    from midflight.building import build_agent

    if recipe.eval_tasks is None:
        raise UserError("eval_tasks = null: there is no question to ask; set eval_tasks.family and eval_tasks.count")
    if keep is not None and keep.exists():
        raise UserError(f"--trajectories {keep}: exists; name a new file")
    tasks = listed_tasks(recipe.eval_tasks)
    name = model or recipe.agent.planner_engine or recipe.model.name
    for line in too_slow(recipe, asked_at_once(recipe, len(tasks))):
        progress.note(line)
    if model is not None:
        progress.note(f"loading {model}")
    built = build_agent(recipe, model, progress=progress)
    try:
        with (
            nullcontext() if keep is None else keep.open("x", buffering=1, encoding="utf-8") as kept,
            progress.bar("evaluating", total=len(tasks) * recipe.evaluation.trials) as bar,
        ):

            def done(one: Scored) -> None:
                if kept is not None:
                    kept.write(trajectory_line(one))
                bar.advance()

            scored = looping.run(
                evaluate(
                    built.flow,
                    tasks,
                    trials=recipe.evaluation.trials,
                    concurrency=recipe.evaluation.concurrency,
                    seed=recipe.seed,
                    score=score,
                    on_done=done,
                )
            )
    finally:
        built.close()
        for line in built.ledger.lines():  # of what was interrupted, too
            progress.note(line)
    result = summarise(scored, resamples=recipe.evaluation.bootstrap, seed=recipe.seed)
    if result.stop_reasons.get("budget") and not result.nothing_scored:
        progress.note(
            f"budget spent: {result.stop_reasons['budget']} trajectories ended without an answer, counted wrong: "
            f"{result.budget_spent}; set it higher"
        )
    used = {"usage": built.ledger.to_json()} if built.ledger.of else {}
    figures = result.to_json() | used
    if result.nothing_scored:
        figures |= {"accuracy": None, "three_or_more": None, "by_kind": {}, "by_level": {}}
    return comparison_table({name: result}), figures


def trajectory_line(scored: Scored) -> str:
    """A trajectory as one line of JSON: `task`, `reward` (null where it was lost) and `trajectory`, all of it: the
    question, each turn with what its modules wrote, call, result and verdict, the answer with its claims."""
    kept = {"task": asdict(scored.task), "reward": scored.earned, "trajectory": asdict(scored.trajectory)}
    return json.dumps(kept) + "\n"


def listed_tasks(source: HeldOutTasks | None) -> list[Task]:
    """The held-out questions, in order."""
    if source is None:
        return []
    if not is_task_file(source.family):
        assert source.count is not None, "recipe_rules.check lets no endless source through"
        return atlas_tasks(source.split, source.count, source.seed, source.kinds)
    return file_tasks(source)[: source.count]


def file_tasks(source: TaskSource) -> list[Task]:
    """The questions of a task file that are of the wanted kinds, in order."""
    return [task for task in load_tasks(source.family) if source.kinds is None or task.kind in source.kinds]
