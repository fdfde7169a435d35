"""Ctrl-C while trajectories run: what has finished is in the store, and the interrupt goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midflight.recipe.config import TrainingConfig
from midflight.store import RunFolder, Store
from midflight.tasks.base import Task
from midflight.training.data import ListSource, TaskStream
from midflight.training.returns import with_signal
from midflight.training.trainer import Trainer
from tests.agent.doubles import LookupTool, compact_flow, population, user_parts

TASKS = [Task("quick", "Peru?", "32933835", kind="quick"), Task("slow", "Chad?", "17179740", kind="slow")]


def trainer(flow: Any, tasks: Sequence[Task] = TASKS, **settings: Any) -> Trainer:
    """A trainer that can make rollouts and nothing else."""
    made = Trainer.__new__(Trainer)
    made.folder = RunFolder(Path("nowhere"))
    made.settings = TrainingConfig(**{"queries_per_step": 2, "group_size": 2, **settings})
    made.stream = TaskStream(ListSource(tasks, 0), 0, None, made.settings.most_queries)
    made.recipe = SimpleNamespace(seed=0)  # type: ignore[assignment]
    made.train_flow = flow
    return made


class Count:
    """A bar that counts."""

    done = 0

    def advance(self, count: int = 1) -> None:
        self.done += count


def plan(request: Any) -> str:
    question, *turns, _ = user_parts(request)
    if "Peru" in question:
        return "finish" if turns else "population: Peru"
    return "sleep: x"


def test_the_finished_trajectories_are_kept(tmp_path: Path) -> None:
    flow, _ = compact_flow(plan, population(), LookupTool("sleep", {"x": "late"}, delay=30.0))
    with Store(tmp_path / "store.sqlite") as store:
        run_id = store.start_run("r", {}, 0)
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(trainer(flow)._rollouts(store, run_id, 3, Count()))
        assert time.monotonic() - started < 5
        kept = store.trajectories(run_id)
        assert [(one.phase, one.step, one.task.id, one.reward) for one in kept] == [
            ("interrupted", 3, "quick", 1.0)
        ] * 2
        assert sorted(one.member for one in kept) == [0, 1]
        assert store.steps(run_id) == {3: None}
        store.drop_steps_from(run_id, 3)
        assert store.trajectories(run_id) == []


def test_the_finished_trajectories_of_an_evaluation_are_kept(tmp_path: Path) -> None:
    flow, _ = compact_flow(plan, population(), LookupTool("sleep", {"x": "late"}, delay=30.0))
    made = trainer(flow)
    made.eval_flow, made.eval_tasks = flow, TASKS
    made.recipe = SimpleNamespace(seed=0, evaluation=SimpleNamespace(trials=2, concurrency=4))  # type: ignore[assignment]
    made.progress = SimpleNamespace(bar=lambda *_: nullcontext(Count()))  # type: ignore[assignment]
    with Store(tmp_path / "store.sqlite") as store:
        run_id = store.start_run("r", {}, 0)
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            made._evaluate(store, run_id, "before")
        kept = store.trajectories(run_id)
        assert [(one.phase, one.step, one.member, one.task.id, one.reward) for one in kept] == [
            ("interrupted", None, 0, "quick", 1.0),
            ("interrupted", None, 1, "quick", 1.0),
        ]


def test_groups_without_signal_are_refilled_up_to_the_cap(tmp_path: Path) -> None:
    flow, engine = compact_flow(lambda request: "finish")
    with Store(tmp_path / "store.sqlite") as store:
        groups = asyncio.run(
            trainer(flow, refill_factor=2.5)._rollouts(store, store.start_run("r", {}, 0), 1, bar := Count())
        )
    assert bar.done == 10
    assert len(groups) == 5  # two, two more, and the one that is left under 2.5 times two
    assert with_signal(groups, TrainingConfig()) == 0
    assert len({request.sampling.seed for request in engine.requests}) == 10


def test_a_refill_asks_other_questions_and_ends_with_enough_groups_that_have_signal(tmp_path: Path) -> None:
    """Of eight questions three can be told apart: those whose answer depends on the seed."""
    tasks = [Task(f"{n}", f"{'Peru' if n < 3 else 'Chad'} {n}?", "32933835") for n in range(8)]

    def half(request: Any) -> str:
        question, *turns, _ = user_parts(request)
        lucky = "Peru" in question and request.sampling.seed % 2
        return "finish" if turns or not lucky else "population: Peru"

    flow, _ = compact_flow(half, population())
    made = trainer(flow, tasks, refill_factor=4.0, group_size=12)
    with Store(tmp_path / "store.sqlite") as store:
        groups = asyncio.run(made._rollouts(store, store.start_run("r", {}, 0), 1, Count()))
    asked = [group.task.id for group in groups]
    live = [with_signal([group], TrainingConfig()) for group in groups]
    assert live == [int(one) < 3 for one in asked]
    assert 2 <= sum(live) <= 3 and 2 < len(groups) < 8
    assert len(set(asked)) == len(asked)
    assert sum(live[:-1]) < 2  # the last draw was needed


@pytest.mark.parametrize(("advantage", "asked"), [("flow_grpo", 8), ("reinforce_pp", 2)])
def test_a_refill_waits_for_what_the_update_would_train_on(tmp_path: Path, advantage: str, asked: int) -> None:
    """Peru is always right and Chad never: nothing to compare within a group, and all there is over the batch."""
    tasks = [Task(f"{n}", f"{('Peru', 'Chad')[n % 2]} {n}?", "32933835") for n in range(8)]
    flow, _ = compact_flow(
        lambda request: plan(request) if "Peru" in str(user_parts(request)) else "finish", population()
    )
    made = trainer(flow, tasks, refill_factor=4.0, advantage=advantage)
    made.stream = SimpleNamespace(draw=lambda step, first, count: tasks[first : first + count])  # type: ignore[assignment]
    with Store(tmp_path / "store.sqlite") as store:
        groups = asyncio.run(made._rollouts(store, store.start_run("r", {}, 0), 1, Count()))
    assert len(groups) == asked
