"""Training with a server as the sampler: the numbers are those of training in one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from midflight.agent.types import StopReason
from midflight.errors import TrainingStopped, UserError
from midflight.recipe import RecipeError
from midflight.server.__main__ import app
from midflight.store import RunFolder, Store, read_metrics
from midflight.tasks.base import Task
from tests.training.test_trainer import TASKS, recipe, run

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("no_plots")]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "midflight.server", "--model", str(model), "--name", "tiny", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait(20)


def test_a_port_that_is_taken_is_one_line_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError) as error:
        app(["--model", "smollm2-135m", "--port", str(taken.getsockname()[1])], standalone_mode=False)
    assert str(error.value).startswith("--host 127.0.0.1 --port ") and "Address already in use" in str(error.value)


def on_server(url: str, model: Path) -> list[str]:
    engine = f"{{provider: vllm, model: tiny, base_url: '{url}', tokenizer: {model}, context_length: 2048, retries: 0}}"
    return [f"engines.sampler={engine}", "agent.planner.engine=sampler"]


def drawn(folder: Path) -> list[tuple[int, ...]]:
    with Store(RunFolder(folder).store) as store:
        (known,) = store.runs()
        return [turn.generation.ids for one in store.trajectories(known.id) for turn in one.trajectory.turns]


def test_steps_on_a_server_are_the_steps_in_one_process(server: str, model: Path, tmp_path: Path) -> None:
    here = run(recipe(model, steps=3), tmp_path / "here")
    there = run(recipe(model, *on_server(server, model), steps=3), tmp_path / "there")
    assert drawn(tmp_path / "here") == drawn(tmp_path / "there")
    for one, other in zip(here, there, strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "trained_tokens", "generated_tokens"):
            assert other[name] == pytest.approx(one[name], abs=1e-4), name
        assert other["trajectories"] == 32 and "usage" not in one
        assert other["usage"]["requests"] == 32 + 1  # the probe of the new weights
        assert other["usage"]["completion_tokens"] == other["generated_tokens"] + 1
    assert [file.name for file in RunFolder(tmp_path / "there").adapters.iterdir()] == ["v3"]


def test_a_token_without_an_embedding_does_not_train(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trajectory with one is an infrastructure failure, and the update takes the others."""
    import midflight.engines.vllm as vllm

    draw, answers = vllm.drawn_tokens, iter(range(10**6))

    def drawn(choice: Any) -> Any:
        ids, logprobs = draw(choice)
        return (257, *ids[1:]) if next(answers) % 4 == 3 else ids, logprobs  # the model has ids up to 256

    monkeypatch.setattr(vllm, "drawn_tokens", drawn)
    (record,) = run(recipe(model, *on_server(server, model), steps=1), tmp_path / "run")
    assert record["trajectories"] == 32 and record["stop_reasons"]["infrastructure"] == 8
    with Store(RunFolder(tmp_path / "run").store) as store:
        errors = [one.trajectory.error for one in store.trajectories(store.runs()[-1].id)]
    assert sum("a token id outside the model's vocabulary" in error for error in errors) == 8


def test_a_spent_budget_stops_the_run_and_a_larger_one_goes_on(server: str, model: Path, tmp_path: Path) -> None:
    settings = [*on_server(server, model), "training.save_every=5"]
    with pytest.raises(
        TrainingStopped,
        match=r"step 2: budget.tokens = 2000: .*; go on with a larger one: .*budget\.tokens=\.\.\.",
    ):
        run(recipe(model, *settings, "budget.tokens=2000", steps=3), tmp_path / "run")
    assert [one.name for one in RunFolder(tmp_path / "run").checkpoints.iterdir()] == ["step-00001"]
    assert [record["step"] for record in read_metrics(RunFolder(tmp_path / "run").metrics)] == [1]
    used = json.loads(RunFolder(tmp_path / "run").usage.read_text())
    most = max(used["prompt_tokens"] + used["completion_tokens"], 2000) + 1
    cut = [*settings, f"budget.tokens={most}", "engines.sampler.concurrency=1"]
    with pytest.raises(TrainingStopped, match=f"step 2: budget.tokens = {most}"):
        run(recipe(model, *cut, steps=3), tmp_path / "run", resume=True)
    small = [*settings, "budget.tokens=40", "engines.sampler.concurrency=1"]  # the check and a probe take 30
    with pytest.raises(TrainingStopped, match="evaluation before training: budget.tokens = 40"):
        run(recipe(model, *small), tmp_path / "small", eval_tasks=TASKS)
    used = RunFolder(tmp_path / "small").usage.read_text()
    spent = json.loads(used)["prompt_tokens"] + json.loads(used)["completion_tokens"]
    assert spent >= 40 and json.loads(used)["requests"] == 3
    again = [*settings, f"budget.tokens={spent}", "engines.sampler.concurrency=1"]
    with pytest.raises(UserError, match=f"budget.tokens = {spent}: spent, with {spent} tokens; the check"):
        run(recipe(model, *again), tmp_path / "small", eval_tasks=TASKS, resume=True)
    assert RunFolder(tmp_path / "small").usage.read_text() == used  # nothing more was asked
    spent_before = json.loads(RunFolder(tmp_path / "run").usage.read_text())["completion_tokens"]
    records = run(recipe(model, *settings, "budget.tokens=100000", steps=3), tmp_path / "run", resume=True)
    assert [record["step"] for record in records] == [1, 2, 3]
    spent_now = json.loads(RunFolder(tmp_path / "run").usage.read_text())["completion_tokens"]
    in_steps = [record["usage"]["completion_tokens"] for record in records]
    started = 2  # by the check and the probe before the first step
    assert spent_now == spent_before + started + sum(in_steps[1:]) > sum(in_steps)  # that of the cut step counts


def test_stragglers_are_cut_off_and_counted(model: Path, tmp_path: Path) -> None:
    import asyncio

    from midflight.tools import tool

    @tool
    async def pick(letter: Annotated[str, Field(pattern="^[a-d]{1,1}$")]) -> str:
        """pick a letter"""
        await asyncio.sleep(60 if letter in "ac" else 0)
        return letter

    settings = recipe(model, "training.rollout_seconds=2", "agent.planner.temperature=2", steps=1)
    from midflight.progress import Progress
    from midflight.training.trainer import train

    tasks = [Task(task.id, task.question, "b") for task in TASKS]
    train(settings, tmp_path / "run", progress=Progress(), tools=[pick], tasks=tasks)
    (record,) = read_metrics(RunFolder(tmp_path / "run").metrics)
    assert 0 < record["stragglers"] < record["trajectories"] == 32
    assert record["stragglers"] == record["stop_reasons"]["cancelled"]
    assert record["seconds_rollout"] < 20
    with Store(RunFolder(tmp_path / "run").store) as store:
        (known,) = store.runs()
        for one in store.trajectories(known.id):
            assert (one.reward is None) == (one.trajectory.stop_reason is StopReason.CANCELLED)


def test_what_the_server_lacks_is_said_before_anything_is_loaded(server: str, model: Path, tmp_path: Path) -> None:
    wrong = [*on_server(server, model), "engines.sampler.model=other"]
    with pytest.raises(UserError, match="engines.sampler.model = other: the server has tiny"):
        run(recipe(model, *wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="a server takes new weights as an adapter"):
        recipe(model, *on_server(server, model), "model.lora=null")
