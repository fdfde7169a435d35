"""`train_on` makes the recipe a person would write and hands its objects to the trainer."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from midflight import solve, train_on
from midflight.errors import UserError
from midflight.recipe import RecipeError
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
    with pytest.raises(UserError, match=r"^overrides: eval_tasks does nothing here; give the questions as tasks and "):
        train_on(TASKS, [double], run_dir="runs/d", overrides=["eval_tasks.count=3"])
    assert not calls


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("a", "How many?", 1), "key 'answer': Input should be a valid string, not 1"),  # type: ignore[arg-type]
        (Task(7, "How many?", "1"), "key 'id': Input should be a valid string, not 7"),  # type: ignore[arg-type]
        (Task("a", " ", "1"), "key 'question' is blank"),
        (Task("a", "How many?", "\n"), "key 'answer' is blank"),
        (Task("a", "How many?", "1", "near"), "unknown checker 'near'; valid: exact, numeric"),
        (Task("a", "How many?", "1", "exact", {"alias": []}), "checker 'exact' has no option 'alias'; valid: aliases"),
        (Task("a", "How many?", "one", "numeric"), "checker 'numeric': the expected answer 'one' is not a number"),
        (Task("0", "How many?", "1"), "id '0' was used by tasks[0]"),
        ({"id": "a"}, "not a Task but dict"),
    ],
)
def test_an_own_task_that_is_wrong_is_named_before_anything_is_loaded(
    task: Task, said: str, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        train_on([*TASKS, task], [double], run_dir=tmp_path / "d")
    assert str(caught.value) == f"tasks[4]: {said}"
    with pytest.raises(UserError, match=r"^eval_tasks\[4\]: "):
        train_on(TASKS, [double], eval_tasks=[*TASKS, task], run_dir=tmp_path / "d")
    assert not calls and not (tmp_path / "d").exists()


def test_what_is_no_tool_is_named(calls: list[dict[str, Any]]) -> None:
    def plain(number: str) -> int:
        return 2 * int(number)

    for take in (lambda tools: train_on(TASKS, tools, run_dir="d"), lambda tools: solve("Why?", "d", tools=tools)):
        with pytest.raises(UserError) as caught:
            take([double, plain])
        assert str(caught.value) == "tools[1]: a function without @tool; decorate it"
        with pytest.raises(UserError, match=r"^tools\[0\]: not a tool but str; see midflight.tools.tool$"):
            take(["double"])
    assert not calls


def test_solve_refuses_what_it_cannot_ask() -> None:
    with pytest.raises(UserError, match="question is empty"):
        solve(" ", "smollm2-135m")
    with pytest.raises(RecipeError, match="model = runs/none: no such folder"):
        solve("Why?", "runs/none")
