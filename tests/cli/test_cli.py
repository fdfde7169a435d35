"""The commands call what they should, and print what it gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import midflight
from midflight.agent.types import Action, Answer, Query, StopReason, ToolResult, Trajectory, Turn, Verdict
from midflight.cli import run
from midflight.engines.base import FinishReason, Generation
from midflight.engines.http import Ledger
from midflight.looping import loop_name
from midflight.recipe import load_recipe, resolved
from tests.cli.lines import Stub, line
from tests.training.recorded import act, entry, record_run

NONE_LOST = {"n": 2, "accuracy": {"mean": 0.5}, "infrastructure": 0}


def test_train_prints_the_report(stub: Stub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, int, Path, bool]] = []

    def train(recipe: Any, run_dir: Path, *, resume: bool, progress: Any) -> None:
        calls.append((recipe.name, recipe.seed, run_dir, resume))
        run_dir.mkdir(parents=True)
        (run_dir / "report.txt").write_text("accuracy\n")

    stub("midflight.training.trainer", train=train)
    stub("midflight.progress", Progress=object)
    assert run(["train", "quickstart", "seed=3"]) == 0
    assert calls == [("quickstart", 3, Path("runs/quickstart-seed3"), False)]
    assert capsys.readouterr().out == "accuracy\n"
    assert run(["report", "runs/quickstart-seed3"]) == 0
    assert capsys.readouterr().out == "accuracy\n"


def test_sft_learns_from_runs_into_a_folder_of_its_own(
    stub: Stub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Path, Any]] = []

    def sft(recipe: Any, run_dir: Path, wanted: Any, *, progress: Any) -> None:
        calls.append((run_dir, wanted))
        if recipe.seed == 5:
            run_dir.mkdir(parents=True)
            (run_dir / "recipe.yaml").write_text("name: x\n")
            raise KeyboardInterrupt
        (run_dir / "inputs").mkdir(parents=True, exist_ok=True)
        (run_dir / "inputs" / "demonstrations.json").write_text("{}")
        (run_dir / "recipe.yaml").write_text(yaml.safe_dump(resolved(recipe)))

    stub("midflight.training.sft", sft=sft)
    stub("midflight.progress", Progress=object)
    teacher = folder / "runs/teacher"
    teacher.mkdir(parents=True)
    (teacher / "recipe.yaml").write_text(yaml.safe_dump(resolved(load_recipe("quickstart"))))
    options = ["--from", "runs/teacher", "--from", "x", "--phase", "all", "--min-reward", "0.5", "--per-question", "2"]
    assert run(["sft", "runs/teacher", *options]) == 2  # the stub writes no report
    own = Path("runs/quickstart-sft-seed0")
    assert line(capsys) == f"midflight: run {own}: no report yet; finish it with: midflight sft {own} --resume"
    assert run(["sft", str(own), "--resume"]) == 2
    line(capsys)
    wanted = (Path("runs/teacher"), Path("x"))
    assert [(at, one and (one.sources, one.phase, one.min_reward, one.per_question)) for at, one in calls] == [
        (own, (wanted, "all", 0.5, 2)),
        (own, None),
    ]
    assert run(["train", str(own), "--resume"]) == 2
    assert line(capsys) == (
        f"midflight: --resume: the run in {own} was made by midflight sft; go on with midflight sft {own} --resume"
    )
    assert run(["sft", "runs/teacher", "--resume"]) == 2
    assert "was made by midflight train; go on with midflight train runs/teacher --resume" in line(capsys)
    assert run(["sft", "quickstart", "seed=5", "--from", "x"]) == 130
    assert line(capsys) == (
        "midflight: interrupted before the first checkpoint; begin again with: midflight sft quickstart seed=5 "
        "--run-dir runs/quickstart-sft-seed5 --resume"
    )


def test_a_dry_run_of_sft_counts_demonstrations_without_torch(folder: Path) -> None:
    entries = [entry(str(n % 20), act("finish"), reward=n % 2) for n in range(60)]
    record_run(folder / "teacher", [replace(one, member=n) for n, one in enumerate(entries)])
    program = (
        "import sys; from midflight.cli import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); sys.exit(100 if heavy else code)"
    )
    arguments = ["sft", "quickstart", "--dry-run", "--from", "teacher", "sft.epochs=3", "sft.batch_size=8"]
    arguments += ["--per-question", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(midflight.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "  optimizer steps, at most    9  3 epochs x 3 batches\n" in done.stdout
    assert re.search(r"demonstrations, at most +20  those that the planner can write\n", done.stdout)
    assert "  key-value cache, about" in done.stdout
    assert done.stdout.endswith(
        "\nDemonstrations\n  30 of 60 trajectories kept, of 10 questions; left out: reward below 1 30\n"
        "  of these at most 2 of one question, the shortest first\n"
        "\nRun folder\n  runs/quickstart-sft-seed0\n"
    )
    assert [file.name for file in folder.iterdir()] == ["teacher"]


def test_ctrl_c_says_how_to_go_on(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    def train(recipe: Any, run_dir: Path, *, resume: bool, progress: Any) -> None:
        if run_dir.name != "s":
            (run_dir / "checkpoints" / "step-00005").mkdir(parents=True)
            (run_dir / "recipe.yaml").write_text("name: x\n")
        if run_dir.name == "r":
            (run_dir / "checkpoints" / "step-00005" / "state.json").write_text('{"step": 5, "quality": 0}')
        raise KeyboardInterrupt

    stub("midflight.training.trainer", train=train)
    stub("midflight.progress", Progress=object)
    assert run(["train", "quickstart", "agent.tools=[calculator]", "--run-dir", "r"]) == 130
    assert line(capsys) == (
        "midflight: interrupted; the checkpoint step-00005 is kept, go on with: "
        "midflight train quickstart 'agent.tools=[calculator]' --run-dir r --resume"
    )
    assert run(["train", "quickstart", "--run-dir", "q"]) == 130
    assert line(capsys) == (
        "midflight: interrupted before the first checkpoint; begin again with: "
        "midflight train quickstart --run-dir q --resume"
    )
    assert run(["train", "quickstart", "--run-dir", "s"]) == 130
    assert line(capsys) == "midflight: interrupted before anything was saved in s; start again"


def test_eval_of_a_run_folder_measures_what_it_trained(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("midflight.evaluation.held_out", evaluate_model=lambda recipe, model, progress, keep: (str(model), NONE_LOST))
    shutil.copytree(Path(__file__).resolve().parents[2] / "recipes", tmp_path, dirs_exist_ok=True)
    (tmp_path / "quickstart.yaml").rename(tmp_path / "recipe.yaml")
    assert run(["eval", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert run(["eval", str(tmp_path), "--model", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == "smollm2-135m"
    assert run(["eval", "quickstart"]) == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_eval_prints_a_table_or_json(stub: Stub, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stub(
        "midflight.evaluation.held_out", evaluate_model=lambda recipe, model, progress, keep: (f"{model} 50", NONE_LOST)
    )
    stub("midflight.progress", Progress=object)
    assert run(["eval", "quickstart", "--model", "smollm2-135m", *(["--json"] if as_json else [])]) == 0
    assert capsys.readouterr().out == (f"{json.dumps(NONE_LOST)}\n" if as_json else "smollm2-135m 50\n")


@pytest.mark.usefixtures("no_work")
def test_dry_run_does_nothing_but_print(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "quickstart", "--dry-run", "training.queries_per_step=4", "training.group_size=2"]) == 0
    printed = capsys.readouterr().out
    assert "  queries_per_step: 4\n" in printed
    assert "4 queries x 2 trajectories" in printed
    assert "134.5M parameters, float32" in printed
    assert printed.endswith("\nRun folder\n  runs/quickstart-seed0\n")
    assert not list(folder.iterdir())


def test_a_dry_run_says_that_its_folder_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs/quickstart-seed3").mkdir(parents=True)
    (folder / "runs/quickstart-seed3/recipe.yaml").touch()
    assert run(["train", "quickstart", "seed=3", "--dry-run"]) == 0
    going_on = "midflight train runs/quickstart-seed3 --resume"
    said = f"exists and is not empty; to go on: {going_on}; or name another folder"
    assert capsys.readouterr().out.endswith(f"\nRun folder\n  --run-dir runs/quickstart-seed3: {said}\n")


def test_without_a_command_the_help_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr()
    assert run([]) == 0
    assert capsys.readouterr() == printed
    assert printed.err == "" and printed.out.count("\n") > 15 and "\n  solve " in printed.out


@pytest.mark.parametrize("arguments", [["--help"], ["train", "quickstart", "--dry-run"], ["--version"], ["train", "x"]])
def test_light_commands_do_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from midflight.cli import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); sys.exit(100 if heavy else code)"
    )
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(midflight.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == (2 if arguments == ["train", "x"] else 0), done.stderr


@pytest.mark.parametrize(
    ("command", "example"),
    [("solve", "agent.max_turns=6"), ("eval", "agent.max_turns=6"), ("train", "training.steps=10")],
)
def test_help_shows_a_change_that_does_something(
    command: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    assert f"Changes to the recipe, such as {example}." in " ".join(capsys.readouterr().out.split())


def test_asking_needs_no_setting_of_training(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub(
        "midflight.evaluation.held_out",
        evaluate_model=lambda recipe, model, progress, keep: (recipe.model.dtype, NONE_LOST),
    )
    stub("midflight.progress", Progress=object)
    half = ["quickstart", "model.dtype=bfloat16"]  # which training refuses without another training.max_drift
    assert run(["eval", *half, "--model", "smollm2-135m", "train_tasks.kinds=[capital]"]) == 0
    assert capsys.readouterr().out == "bfloat16\n"
    assert run(["train", *half, "--dry-run"]) == 2
    assert "training.max_drift = 0.0001: " in line(capsys)


def test_a_run_without_held_out_questions_has_no_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "r").mkdir()
    (folder / "r/recipe.yaml").write_text(yaml.safe_dump(resolved(load_recipe("quickstart", ["eval_tasks=null"]))))
    assert run(["report", "r"]) == 0
    assert capsys.readouterr().out == "r has no held-out questions, so no report; its steps are in r/metrics.jsonl\n"
    assert run(["eval", "r", "--model", "smollm2-135m"]) == 2
    assert line(capsys) == (
        "midflight: eval_tasks = null: there is no question to ask; set eval_tasks.family and eval_tasks.count"
    )
    assert run(["train", "r", "--dry-run"]) == 0
    assert "evaluation trajectories" not in capsys.readouterr().out


def test_doctor_prints_one_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert {text.split()[0] for text in lines} <= {"ok", "missing", "note"}
    assert code == (1 if any(text.startswith("missing") for text in lines) else 0)
    assert any(text.startswith("ok       Python") for text in lines)
    mark = "ok  " if loop_name() == "uvloop" else "note"
    assert any(text.startswith(f"{mark}     event loop       {loop_name()}") for text in lines)


def test_solve_streams_the_turns_and_prints_the_answer(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []
    turn = Turn(
        1,
        Generation("capital: Peru", FinishReason.STOP),
        Action("", "capital", "Peru"),
        None,
        ToolResult("Lima"),
        Verdict(False),
    )

    class Flow:
        async def run(self, query: Query, *, on_turn: Callable[[Turn], None]) -> Trajectory:
            on_turn(turn)
            answer = None if query.text == "fail" else Answer("" if query.text == "empty" else "Lima")
            reason = StopReason.FINISHED if answer else StopReason.INFRASTRUCTURE
            return Trajectory(query, (turn,), reason, answer, error="" if answer else "engine down")

    built = types.SimpleNamespace(flow=Flow(), ledger=Ledger(), close=lambda: closed.append(True))
    stub("midflight.building", build_agent=lambda recipe, model, progress: built)
    assert run(["solve", "Capital of Peru?"]) == 0
    said = capsys.readouterr()
    assert said.out == "Turn 1    capital: Peru\n  result  Lima\n\nLima\n"
    assert said.err == "loading smollm2-135m\n"
    assert run(["solve", "fail"]) == 1
    loading = "loading smollm2-135m\n"
    assert capsys.readouterr().err == f"{loading}midflight: no answer: infrastructure: engine down\n"
    assert run(["solve", "empty"]) == 1
    assert capsys.readouterr().err == f"{loading}midflight: no answer: finished: the agent ended without one\n"
    assert closed == [True, True, True]
    assert run(["solve", "Capital of Peru?", "train_tasks.family=gone.jsonl"]) == 0  # draws no task, needs no file
