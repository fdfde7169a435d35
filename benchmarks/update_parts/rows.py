"""Rows for the update benchmark: those of a stored step, those of a step made now, or built to a size.

Invariant: a stored step gives the rows that its update trained, in the same order, or is refused.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from midflight.agent import LLMPlanner, Query
from midflight.agent.memory import Memory
from midflight.agent.types import Action, ToolResult, Turn, Verdict
from midflight.building import assemble, toolset_of
from midflight.engines.base import FinishReason, Generation
from midflight.engines.local import LocalEngine
from midflight.errors import UserError
from midflight.evaluation.held_out import listed_tasks
from midflight.recipe import Recipe
from midflight.recipe.config import TrainingConfig
from midflight.store import RunFolder, Store

from .ours import Row, rows_trained, train_one_step, trunk_length

FREE_TOKENS = 3
"""Trained tokens of a built action; the rest is forced, as a grammar does."""


def check_stored(settings: TrainingConfig) -> None:
    """Refuse settings under which a store does not hold all that a step trained on.

    Raises:
        UserError: it lacks the reference's log-probs.
    """
    if settings.kl_beta > 0 and settings.kl_in == "reward":
        raise UserError(
            "training.kl_in = reward: advantages hold the KL to the reference, which is not stored; name a run or a "
            "recipe with training.kl_in=loss"
        )


def stored_rows(run: Path, step: int, settings: TrainingConfig) -> list[Row]:
    """The rows of a run's training step.

    Raises:
        UserError: the folder is no run, has no such step, or the step trained nothing, or on what no store holds.
    """
    check_stored(settings)
    file = RunFolder(run).store
    if not file.is_file():
        raise UserError(f"--run {run}: holds no store.sqlite, so no run; name a run folder")
    with Store(file) as store:
        runs = store.runs()
        steps = list(store.steps(runs[-1].id)) if runs else []
        if step not in steps:
            have = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise UserError(f"--step {step}: not a step of {run}; name one of its steps ({have})")
        rows = rows_trained(store.trajectories(runs[-1].id, "train", step), settings)
    if not rows:
        raise UserError(f"--step {step}: no group of it has signal, so it trained nothing; name another step")
    return rows


def made_rows(recipe: Recipe) -> list[Row]:
    """The rows of the first step of `recipe`, whose trajectories the untrained model makes now.

    Raises:
        UserError: the step trained nothing, or on what no store holds.
    """
    check_stored(recipe.training)
    with tempfile.TemporaryDirectory() as folder:
        train_one_step(recipe, Path(folder))
        return stored_rows(Path(folder), 1, recipe.training)


def length(row: Row) -> int:
    """Tokens of prompt and action."""
    return len(row.prompt_ids) + len(row.ids)


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` of the rows, evenly spread over their order by length; all of them where there are no more."""
    ordered = sorted(rows, key=length)
    if len(rows) <= count:
        return ordered
    return [ordered[(2 * index + 1) * len(ordered) // (2 * count)] for index in range(count)]


def copies(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` times the rows, of which no two copies share more than what all rows begin with.

    In each further copy the token behind that beginning is another one, so a packing meets nothing twice.
    """
    place = trunk_length(rows)
    present = sorted({row.prompt_ids[place] for row in rows})
    others = (token for token in range(len(present) * (count + 1)) if token not in present)
    made = list(rows)
    for _ in range(1, count):
        renamed = {token: next(others) for token in present}
        for row in rows:
            ids = list(row.prompt_ids)
            ids[place] = renamed[ids[place]]
            made.append(replace(row, prompt_ids=tuple(ids)))
    return made


def built_rows(
    recipe: Recipe, engine: LocalEngine, *, queries: int, group: int, turns: int, result_tokens: int
) -> list[Row]:
    """Rows of `queries` groups of `group` trajectories, all of `turns` turns with results of about `result_tokens`.

    Questions, tools and prompts are the recipe's; which tool a turn calls and what it gives back is drawn.
    """
    toolset = toolset_of(recipe)
    planner = assemble(recipe, toolset, engine, engine, training=True).planner
    assert isinstance(planner, LLMPlanner)
    rng = random.Random(recipe.seed)
    rows = []
    for task in listed_tasks(recipe.eval_tasks)[:queries]:
        for member in range(group):
            memory = Memory(turns * (result_tokens + 64))
            for index in range(1, turns + 1):
                tool = rng.choice(recipe.agent.tools)
                messages = planner.messages(Query(task.question), toolset, memory, turns - index + 1, "")
                ids = tuple(engine.tokenizer(f" {tool}: {task.answer}\n", add_special_tokens=False)["input_ids"])
                rows.append(
                    Row(
                        prompt_ids=tuple(token for segment in engine.encode(messages) for token in segment),
                        ids=ids,
                        logprobs=(0.0,) * len(ids),
                        forced=tuple(position >= FREE_TOKENS for position in range(len(ids))),
                        temperature=recipe.agent.planner.temperature,
                        grammar=None,
                        advantage=1.0 if member % 2 else -1.0,
                        weight=1.0 / (queries * group * turns * min(FREE_TOKENS, len(ids))),
                    )
                )
                result = "".join(rng.choices("0123456789", k=result_tokens))  # a digit is a token
                action = Action("", tool, task.answer)
                said = Generation("", FinishReason.STOP)
                memory.append(Turn(index, said, action, None, ToolResult(result), Verdict(False)))
    return rows


def save_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows for another process of this benchmark."""
    file.write_bytes(pickle.dumps(list(rows)))


def load_rows(file: Path) -> list[Row]:
    """Read what `save_rows` wrote."""
    rows: list[Row] = pickle.loads(file.read_bytes())
    return rows
