"""The command line with the real modules behind it, on a model of a few random weights."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import midflight
from midflight.cli import run
from tests.training.tiny import make_tiny_model

pytestmark = pytest.mark.model

SMALL = ["training.queries_per_step=2", "training.group_size=4", "training.save_every=1", "eval_tasks.count=12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_prompt_that_does_not_fit_is_one_line_and_leaves_no_folder(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["model.context_length=200", "agent.memory_tokens=64", "agent.planner.max_tokens=16"]
    assert run(["train", "quickstart", f"model.name={model}", *budget]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("midflight: model.context_length = 200: the planner's prompt takes ")
    assert not (folder / "runs").exists()


def test_solve_streams_and_eval_prints_one_object(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["solve", "What is 2 + 3?", "agent.max_turns=2", "--model", str(model)]) in (0, 1)
    assert capsys.readouterr().out.startswith("Turn 1    ")
    assert run(["eval", "quickstart", "eval_tasks.count=12", "--model", str(model), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["n"] == 12
    assert "evaluating: 12/12" in printed.err


def test_credit_continues_a_trajectory_of_a_run(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "quickstart", f"model.name={model}", *SMALL, "training.steps=1", "--run-dir", "r"]) == 0
    capsys.readouterr()
    assert run(["credit", "--run", "r", "--phase", "train", "--json"]) == 0
    chosen = next(line for line in json.loads(capsys.readouterr().out) if line["turns"] > 1)
    assert run(["credit", str(chosen["id"]), "--run", "r", "--continuations", "8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"] == "r/checkpoints/step-00001" and said["lost"] == 0
    assert [turn["before"]["n"] for turn in said["turns"]] == [8] * chosen["turns"]
    assert said["turns"][0]["group_before"]["n"] == 4  # every member of the group was at the start


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(model: Path, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(midflight.__file__).parent.parent)}
    program = [sys.executable, "-m", "midflight"]
    command = [*program, "train", "quickstart", f"model.name={model}", *SMALL, "training.steps=400", "name=tiny"]
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    assert started.stderr is not None
    for line in started.stderr:
        if line.startswith("step   2/400"):
            break
    time.sleep(0.3)
    started.send_signal(signal.SIGINT)
    output, errors = started.communicate(timeout=60)
    *steps, last = errors.splitlines()
    assert started.returncode == 130
    assert all(line.startswith("step ") for line in steps), errors
    assert last.startswith("midflight: interrupted; the checkpoint step-0000")
    assert last.endswith(" --run-dir runs/tiny-seed0 --resume")
    assert output == ""
    run_dir = folder / "runs/tiny-seed0"
    with sqlite3.connect(run_dir / "store.sqlite") as store:
        kept = dict(store.execute("SELECT step, count(*) FROM trajectories WHERE phase = 'train' GROUP BY step"))
    assert kept[1] >= 8 and kept[2] >= 8
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir())[-1] in last
