"""The short way in from Python: your tools, your questions, a few steps of training, answers, and which turns decided.

It makes the recipe that `midflight train` would read and calls the same trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midflight import looping
from midflight.agent.types import Query, Trajectory, Turn
from midflight.errors import UserError
from midflight.recipe import Recipe
from midflight.recipe.own import check_kept_tools, check_tools, own_tools
from midflight.recipe.reading import apply_overrides, load_recipe, pin_model
from midflight.recipe.resuming import read_recipe
from midflight.recipe.rules import check, check_model_name
from midflight.recipe.validating import validate
from midflight.store.folder import RunFolder
from midflight.tasks.base import Task
from midflight.tasks.jsonl import check_tasks
from midflight.tools.base import Tool

if TYPE_CHECKING:
    from midflight.evaluation.credit import TrajectoryCredit
    from midflight.training.finished import TrainReport


def recipe_for(
    tools: Sequence[Tool], *, name: str, model: str, steps: int, max_turns: int, overrides: Sequence[str] = ()
) -> Recipe:
    """A recipe with a compact planner over `tools` and rules for the other three modules.

    Raises:
        RecipeError: something in it is wrong; one line.
    """
    plain: dict[str, Any] = {
        "name": name,
        "model": {"name": model},
        "agent": {
            "planner": {"format": "compact"},
            "executor": {"kind": "direct"},
            "verifier": {"kind": "rule"},
            "generator": {"kind": "last_result"},
            "max_turns": max_turns,
            "tools": [tool.name for tool in tools],
        },
        "training": {"steps": steps, "learning_rate": 2e-4},
    }
    recipe = validate(apply_overrides(plain, overrides))
    check(recipe, own_tools=[tool.name for tool in tools], own_tasks=True)
    return pin_model(recipe)


def train_on(
    tasks: Sequence[Task],
    tools: Sequence[Tool],
    *,
    run_dir: str | Path,
    eval_tasks: Sequence[Task] = (),
    model: str = "smollm2-135m",
    steps: int = 10,
    max_turns: int = 3,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> TrainReport:
    """Train the planner of `model` to answer `tasks` with `tools`.

    Args:
        tasks: questions to train on.
        tools: what the planner can call; see `midflight.tools.tool`.
        run_dir: where the run's files go.
        eval_tasks: held-out questions, asked before and after; without them nothing is evaluated.
        model: as `model.name` in a recipe.
        steps: updates.
        max_turns: most turns of one trajectory.
        overrides: changes to the recipe, such as `training.group_size=4`.
        resume: go on from the last checkpoint in `run_dir`, with the same questions and tools.

    Raises:
        UserError: something given is wrong; one line.
    """
    from midflight.progress import Progress
    from midflight.training.trainer import train

    if not tasks:
        raise UserError("tasks is empty; give at least one Task")
    check_tasks(tasks, "tasks")
    check_tasks(eval_tasks, "eval_tasks")
    check_tools(tools)
    for override in overrides:
        for key in ("train_tasks", "eval_tasks"):
            if override.strip().startswith(key):
                raise UserError(f"overrides: {key} does nothing here; give the questions as tasks and eval_tasks")
    folder = Path(run_dir)
    recipe = recipe_for(tools, name=folder.name, model=model, steps=steps, max_turns=max_turns, overrides=overrides)
    progress = Progress()
    try:
        return train(
            recipe,
            folder,
            resume=resume,
            progress=progress,
            evaluate_ends=bool(eval_tasks),
            tools=tools,
            tasks=tasks,
            eval_tasks=eval_tasks or None,
        )
    except KeyboardInterrupt:
        progress.note(f"interrupted; go on with the same program and train_on(..., resume=True) ({folder})")
        raise


def solve(
    question: str,
    model: str | Path,
    *,
    tools: Sequence[Tool] = (),
    on_turn: Callable[[Turn], None] | None = None,
) -> Trajectory:
    """Answer one question; `answer` of what it returns is None when there was none to make.

    Args:
        question: what to ask.
        model: a run folder, for its recipe and newest checkpoint; or as `model.name` in a recipe.
        tools: your own tools, as in training.
        on_turn: called with each finished turn.

    Raises:
        UserError: something given is wrong; one line.
    """
    if not question.strip():
        raise UserError("question is empty; write what to ask")
    check_tools(tools)
    name, folder = str(model), RunFolder(Path(model))
    check_model_name(name, f"model = {name}")
    if folder.recipe.is_file():
        recipe = read_recipe(folder.recipe)
        check_kept_tools(folder, recipe, own_tools(recipe, tools))
        for tool in tools:
            if tool.name not in recipe.agent.tools:
                raise UserError(
                    f"tools: {tool.name} does nothing, as {name} has {', '.join(recipe.agent.tools)}; leave it out"
                )
        check(recipe, own_tools=[tool.name for tool in tools], own_tasks=True, training=False)
    elif tools:
        recipe = recipe_for(tools, name="solve", model=name, steps=1, max_turns=3)
    else:
        recipe = load_recipe("quickstart", tasks=False, training=False)

    from midflight.building import build_agent
    from midflight.progress import Progress

    progress = Progress()
    progress.note(f"loading {name}")
    built = build_agent(recipe, name, tools=tools, progress=progress)
    try:
        return looping.run(built.flow.run(Query(question, seed=recipe.seed), on_turn))
    finally:
        built.close()


def credit(
    run_dir: str | Path,
    trajectory: int,
    *,
    tools: Sequence[Tool] = (),
    model: str | None = None,
    continuations: int = 16,
    seed: int | None = None,
) -> TrajectoryCredit:
    """What each turn of a stored trajectory changed in the expected reward; `turning_point` is the turn that decided.

    Args:
        run_dir: the run's folder.
        trajectory: its id in the run's store (`midflight credit --run RUN` lists them).
        tools: your own tools, as in training.
        model: who continues, at the training temperature; the run's newest checkpoint by default.
        continuations: from each state.
        seed: of the continuations; the run's by default.

    Raises:
        UserError: something given is wrong; one line.
    """
    check_tools(tools)

    from midflight.evaluation.crediting import Continuing, credit_trajectory
    from midflight.progress import Progress

    how = Continuing(continuations, model, seed, tools)
    return credit_trajectory(Path(run_dir), trajectory, how, Progress()).credit
