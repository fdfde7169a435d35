"""That an engine's pace is too slow is said where it is known how many trajectories are at once, and nowhere else."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from midflight import building
from midflight.errors import UserError
from midflight.evaluation.held_out import evaluate_model
from midflight.progress import Progress
from midflight.recipe import Recipe, load_recipe
from midflight.tasks.base import Task
from midflight.training import session
from midflight.training.trainer import Trainer

QUESTION = Task("q", "?", "a")


def paced(*overrides: str) -> Recipe:
    """Ten trajectories at once are what its server can carry."""
    engine = "{provider: openai, model: m, base_url: 'http://127.0.0.1:1/v1', requests_per_minute: 5}"
    own = ["agent.verifier={kind: llm, engine: judge}", "agent.max_seconds=120", "eval_tasks.count=11"]
    own.append("agent.planner.eval_temperature=0.5")
    return load_recipe("quickstart", [f"engines.judge={engine}", *own, *overrides])


def warning(count: int, key: str) -> str:
    return (
        f"warning: engines.judge.requests_per_minute = 5: too slow for {count} trajectories at once ({key}), which "
        f"take {count * 12} s with one turn each (1 requests), and agent.max_seconds = 120; set {key} to 10 or less, "
        f"or agent.max_seconds above {count * 12}\n"
    )


def no_engines(*_: Any) -> None:
    raise UserError("far enough")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(building, "engines_of", no_engines)
    monkeypatch.setattr(session, "engines_of", no_engines)
    return io.StringIO()


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ((), 11),
        (("eval_tasks.count=10",), 0),
        (("evaluation.trials=2",), 22),
        (("evaluation.trials=9", "evaluation.concurrency=64"), 64),
        (("evaluation.concurrency=10",), 0),
    ],
)
def test_an_evaluation(overrides: tuple[str, ...], count: int, said: io.StringIO) -> None:
    with pytest.raises(UserError, match="far enough"):
        evaluate_model(paced(*overrides), None, Progress(said))
    assert said.getvalue() == (warning(count, "evaluation.concurrency") if count else "")


def test_an_agent_of_which_one_question_is_asked_says_nothing(said: io.StringIO) -> None:
    with pytest.raises(UserError, match="far enough"):
        building.build_agent(paced(), progress=Progress(said))
    assert said.getvalue() == ""


@pytest.mark.parametrize(("held_out", "evaluation"), [([], 0), ([QUESTION] * 10, 0), ([QUESTION] * 11, 11)])
def test_training(held_out: list[Task], evaluation: int, said: io.StringIO, tmp_path: Path) -> None:
    recipe = paced("training.queries_per_step=3", "training.group_size=4")
    with pytest.raises(UserError, match="far enough"):
        Trainer(recipe, tmp_path, Progress(said), None, [QUESTION], held_out)
    asked = warning(evaluation, "evaluation.concurrency") if evaluation else ""
    assert said.getvalue() == asked + warning(12, "training.queries_per_step x group_size")
