"""Runs that are killed or interrupted, as processes of the command line on the embedded model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midflight.store import RunFolder, Store
from midflight.store.metrics import read_metrics

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Ghana": "Accra", "Nepal": "Kathmandu"}
RECIPE = """
name: tiny
model: {name: smollm2-135m, chat_template: false, context_length: 256, max_batch: %d, lora: {rank: 4, alpha: 8}}
agent:
  planner: {format: compact, examples: examples.txt, max_tokens: 8}
  executor: {kind: direct}
  verifier: {kind: rule}
  generator: {kind: last_result}
  max_turns: %d
  memory_tokens: 48
  tools: [capital, population]
train_tasks: {family: train.jsonl}
eval_tasks: {family: held_out.jsonl}
training:
  steps: %d
  queries_per_step: %d
  group_size: 4
  learning_rate: 5e-4
  kl_beta: 0.01
  refill_factor: 1.5
  save_every: %d
"""
TIMES = {"seconds", "seconds_rollout", "seconds_update", "tokens_per_second"}


def write_recipe(folder: Path, *, max_batch: int, max_turns: int, steps: int, queries: int, save_every: int) -> Path:
    (folder / "examples.txt").write_text("Question: What is the capital of Cuba?\nTurn 1: capital: Cuba\n")
    lines = [
        json.dumps({"id": name, "question": f"What is the capital of {name}?", "answer": city, "checker": "exact"})
        for name, city in CAPITALS.items()
    ]
    (folder / "train.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (folder / "held_out.jsonl").write_text(lines[4] + "\n")
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE % (max_batch, max_turns, steps, queries, save_every))
    return recipe


def start(recipe: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "midflight", "train", str(recipe), "--run-dir", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=recipe.parent
    )


def wait_for(process: subprocess.Popen[str], ready) -> None:
    """Until `ready()`; fails when the process ends or two minutes pass first."""
    limit = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "nothing happened for two minutes"
        time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return errors


def numbers(folder: RunFolder) -> list[dict[str, object]]:
    return [{key: value for key, value in one.items() if key not in TIMES} for one in read_metrics(folder.metrics)]


def test_killed_in_the_middle_of_a_step_and_resumed_it_prints_the_same_numbers(tmp_path):
    recipe = write_recipe(tmp_path, max_batch=64, max_turns=2, steps=4, queries=2, save_every=2)
    undisturbed, killed = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    finish(start(recipe, undisturbed.path))
    process = start(recipe, killed.path)
    wait_for(process, lambda: len(read_metrics(killed.metrics)) == 3)
    time.sleep(0.2)  # into step 4: step 3 is done but not saved
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [folder.name for folder in killed.checkpoints.glob("step-*")] == ["step-00002"]
    assert "resuming" in finish(start(recipe, killed.path, "--resume"))

    expected = numbers(undisturbed)
    assert [one["step"] for one in expected] == [1, 2, 3, 4]
    assert any(one["trained_tokens"] for one in expected[2:]), "steps that train nothing would show nothing"
    assert numbers(killed) == expected
    for file in ("adapter_model.safetensors", "optimizer.pt", "state.json"):
        ours, theirs = (run.checkpoints / "step-00004" / file for run in (killed, undisturbed))
        assert ours.read_bytes() == theirs.read_bytes(), file
    drawn = []
    for run in (undisturbed, killed):
        with Store(run.store) as store:
            records = store.trajectories(store.runs()[-1].id, "train")
        drawn.append([(one.step, one.task.id, one.reward, [turn.generation for turn in one.trajectory.turns])
                      for one in records])  # fmt: skip
    assert drawn[0] == drawn[1]


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_go_on(tmp_path):
    recipe = write_recipe(tmp_path, max_batch=1, max_turns=1, steps=2, queries=4, save_every=1)
    run = RunFolder(tmp_path / "run")
    process = start(recipe, run.path)
    wait_for(process, lambda: (run.checkpoints / "step-00001").is_dir())
    (first,) = read_metrics(run.metrics)
    time.sleep(0.5 * first["seconds_rollout"])  # into the rollouts of step 2, which are drawn one by one
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output == "" and "Traceback" not in errors
    said = [line for line in errors.splitlines() if "interrupted" in line]
    assert said == [errors.splitlines()[-1]]
    begins = "midflight: interrupted; the checkpoint step-00001 is kept, go on with: midflight train "
    assert said[0].startswith(begins)
    assert said[0].endswith("--resume")
    with Store(run.store) as store:
        kept = store.trajectories(store.runs()[-1].id, "interrupted")
        stored = store.trajectories(store.runs()[-1].id, "train")
    assert 0 < len(kept) < 24 and {one.step for one in kept} == {2}
    assert all(one.reward is not None and one.trajectory.turns for one in kept)
    assert {one.step for one in stored} == {1}
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-00001"]
    names = {file.name for file in (run.checkpoints / "step-00001").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "state.json"} <= names
