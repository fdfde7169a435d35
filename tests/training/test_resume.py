"""A run that is killed, as a process of the command line on the embedded model; `test_struck` has all the places."""

import json
import signal
from pathlib import Path

import pytest

from midflight.store import RunFolder, Store
from midflight.store.metrics import read_metrics
from tests.training.struck import Strike, midflight

pytestmark = pytest.mark.model

CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Ghana": "Accra", "Nepal": "Kathmandu"}
RECIPE = """
name: tiny
model: {name: smollm2-135m, chat_template: false, context_length: 256, max_batch: 64, lora: {rank: 4, alpha: 8}}
agent:
  planner: {format: compact, examples: examples.txt, max_tokens: 8}
  executor: {kind: direct}
  verifier: {kind: rule}
  generator: {kind: last_result}
  max_turns: 2
  memory_tokens: 48
  tools: [capital, population]
train_tasks: {family: train.jsonl}
eval_tasks: {family: held_out.jsonl}
training:
  steps: 4
  queries_per_step: 2
  group_size: 2
  learning_rate: 5e-4
  kl_beta: 0.01
  refill_factor: 1.5
  save_every: 2
"""
TIMES = {"seconds", "seconds_rollout", "seconds_update", "tokens_per_second"}


def write_recipe(folder: Path) -> Path:
    (folder / "examples.txt").write_text("Question: What is the capital of Cuba?\nTurn 1: capital: Cuba\n")
    lines = [
        json.dumps({"id": name, "question": f"What is the capital of {name}?", "answer": city, "checker": "exact"})
        for name, city in CAPITALS.items()
    ]
    (folder / "train.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (folder / "held_out.jsonl").write_text(lines[4] + "\n")
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE)
    return recipe


def numbers(folder: RunFolder) -> list[dict[str, object]]:
    return [{key: value for key, value in one.items() if key not in TIMES} for one in read_metrics(folder.metrics)]


@pytest.mark.long
def test_killed_between_two_checkpoints_and_resumed_it_prints_the_same_numbers(tmp_path):
    recipe = write_recipe(tmp_path)
    undisturbed, killed = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")

    def train(run, *options, strike=None):
        command = ["train", str(recipe), "--run-dir", str(run.path), *options]
        return midflight(command, tmp_path / "log", strike, limit=600)

    ended = train(undisturbed)
    assert ended.code == 0, ended.lines
    assert train(killed, strike=Strike("backward", "SIGKILL", steps=3, call=2)).code == -signal.SIGKILL
    assert len(read_metrics(killed.metrics)) == 3  # step 3 is done but not saved
    assert [folder.name for folder in killed.checkpoints.glob("step-*")] == ["step-00002"]
    ended = train(killed, "--resume")
    assert ended.code == 0 and f"resuming {killed.path} after step 2" in ended.lines, ended.lines

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
