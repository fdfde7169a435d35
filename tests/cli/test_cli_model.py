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
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

SMALL = ["training.queries_per_step=2", "training.group_size=4", "training.save_every=1", "eval_tasks.count=12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


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


def test_sft_on_a_run_evaluates_reports_and_warm_starts_the_next(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*SMALL, "training.steps=1", "training.warmup_steps=0"]
    assert run(["train", "quickstart", f"model.name={model}", *few]) == 0
    capsys.readouterr()
    given = [
        "eval_tasks.count=12",
        "training.save_every=1",
        "training.warmup_steps=0",
        "sft.batch_size=4",
        "sft.epochs=1",
    ]
    learn = ["sft", "quickstart", f"model.name={model}", *given, "--from", "runs/quickstart-seed0"]
    assert run(learn) == 2  # noise earns nothing
    assert "nothing to learn from: 0 of 8 trajectories kept" in capsys.readouterr().err
    assert run([*learn, "--min-reward", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("quickstart, seed 0: held-out questions before and after training\n")
    assert "plots: runs/quickstart-sft-seed0/plots (loss.png, accuracy.png)" in printed.out
    assert "step 1/2  loss " in printed.err and "demonstrations: 8 of 8 trajectories kept" in printed.err
    assert run(["sft", "runs/quickstart-sft-seed0", "--resume"]) == 0
    assert capsys.readouterr() == (printed.out, "runs/quickstart-sft-seed0 is finished: nothing to do\n")
    Path("runs/quickstart-sft-seed0/report.json").unlink()
    assert run(["sft", "runs/quickstart-sft-seed0", "--resume"]) == 0
    assert "resuming runs/quickstart-sft-seed0 after step 2" in capsys.readouterr().err
    assert run(["eval", "quickstart", "eval_tasks.count=12", "--model", "runs/quickstart-sft-seed0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 12
    assert run(["train", "quickstart", "model.name=runs/quickstart-sft-seed0", *few, "name=warm"]) == 0
    saved = json.loads(Path("runs/warm-seed0/checkpoints/step-00001/state.json").read_text())
    assert saved["base"] == str(Path("runs/quickstart-sft-seed0/checkpoints/step-00002").resolve())
    capsys.readouterr()
    assert run(["solve", "What is 2 + 3?", "agent.max_turns=1", "--model", "runs/warm-seed0"]) in (0, 1)
    assert "Turn 1    " in capsys.readouterr().out
