"""`train_on` makes the recipe a person would write and hands its objects to the trainer."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from midflight.api import train_on
from midflight.config import RecipeError
from midflight.errors import UserError
from midflight.tasks import Task
from midflight.tools import tool

TASKS = [Task(id=str(number), question=f"Double {number}?", answer=str(2 * number)) for number in range(4)]


@tool
def double(number: str) -> int:
    """Twice a number."""
    return 2 * int(number)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the trainer was called with."""
    seen: list[dict[str, Any]] = []
    trainer = types.ModuleType("midflight.training.trainer")
    trainer.train = lambda recipe, run_dir, **named: seen.append({"recipe": recipe, "run_dir": run_dir, **named})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "midflight.training.trainer", trainer)
    return seen


def test_objects_and_recipe_reach_the_trainer(calls: list[dict[str, Any]]) -> None:
    train_on(TASKS[:3], [double], eval_tasks=TASKS[3:], steps=4, run_dir="runs/d", overrides=["training.group_size=4"])
    (call,) = calls
    assert call["run_dir"] == Path("runs/d")
    assert (call["tools"], call["tasks"], call["eval_tasks"]) == ([double], TASKS[:3], TASKS[3:])
    assert call["evaluate_ends"] is True and call["resume"] is False
    recipe = call["recipe"]
    assert (recipe.name, recipe.agent.tools) == ("d", ("double",))
    assert (recipe.training.steps, recipe.training.group_size) == (4, 4)


def test_without_held_out_questions_nothing_is_evaluated(calls: list[dict[str, Any]]) -> None:
    train_on(TASKS, [double], run_dir="runs/d")
    assert calls[0]["evaluate_ends"] is False and calls[0]["eval_tasks"] is None


def test_what_is_wrong_is_said_before_training(calls: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="tasks is empty"):
        train_on([], [double], run_dir="runs/d")
    with pytest.raises(RecipeError, match="double is listed twice"):
        train_on(TASKS, [double, double], run_dir="runs/d")
    with pytest.raises(RecipeError, match=r"model.name = smollm: unknown model"):
        train_on(TASKS, [double], run_dir="runs/d", model="smollm")
    assert not calls
