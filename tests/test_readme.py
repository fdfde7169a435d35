"""The README's commands, typed into a copy of what a clone holds, with the real model and few steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parent.parent
SHORT = "agent.max_turns=2"
FEW = ["training.steps=1", "training.warmup_steps=0", "training.queries_per_step=2", "training.group_size=2", SHORT]
ASKED = "eval_tasks.count=4"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone") / "midflight"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist"))
    return folder


def type_in(clone: Path, *words: str) -> str:
    """Run a command there and give its standard output; it has to end well."""
    command = [sys.executable, "-m", *words] if words[0] == "midflight" else [sys.executable, *words]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def commands(clone: Path) -> list[list[str]]:
    """The `midflight` lines of the README's sh blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (clone / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("midflight ")]


@pytest.mark.long
def test_the_commands_of_the_readme_work_in_a_fresh_clone(clone: Path) -> None:
    assert "$(BIN)/midflight train recipes/quickstart.yaml\n" in (clone / "Makefile").read_text()
    report = type_in(clone, "midflight", "train", "recipes/quickstart.yaml", *FEW, ASKED)
    assert report.startswith("quickstart, seed 0: held-out questions before and after training\n")
    assert "plots: runs/quickstart-seed0/plots (reward.png, tools.png, turns.png, errors.png, accuracy.png)" in report
    question = {"question": "What is the capital of Peru?", "answer": "Lima", "checker": "exact"}
    for name in ("mine", "held-out"):
        lines = (json.dumps({"id": f"{name}{number}", **question}) for number in range(2))
        (clone / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    found = commands(clone)
    assert len(found) == 9
    said = {}
    for words in found:
        if words[1] == "train" and "--dry-run" not in words:
            words += FEW
        if words[1] == "eval":
            words += [ASKED, SHORT]
        said[" ".join(words[1:3])] = type_in(clone, *words)
    assert "Turn 1" in said["solve What is the population density of Peru?"]
    assert said["report runs/quickstart-seed0"] == report
    assert json.loads(said["eval quickstart"])["questions"] == 4
    assert "rollouts of the run, at most" in said["train four-llm"]
    assert "calculator(" in said["tools"]
    shutil.rmtree(clone / "recipes")
    assert "Turn 1" in type_in(clone, "midflight", "solve", "What is 2 * 3?", "--model", "runs/quickstart-seed0")


@pytest.mark.long
def test_the_example_program_trains(clone: Path) -> None:
    *_, answer, last = type_in(clone, "examples/minimal.py").splitlines()
    assert answer.startswith("Answer(text='") and last == "Try: midflight report runs/stock"
    records = [json.loads(line) for line in (clone / "runs/stock/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 5 and sum(record["trained_tokens"] for record in records) > 0
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    report = type_in(clone, "midflight", "report", "runs/stock")
    assert "held-out questions before and after" in report
    before, after = (float(right) for right in re.findall(r"^(?:before|after) +3 +([\d.]+)", report, re.MULTILINE))
    assert before <= after
