"""What a command refuses, and how it ends where its work fails: one line, and the exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from midflight.cli import run
from midflight.errors import TrainingStopped, UserError
from midflight.recipe import load_recipe, resolved
from tests.cli.lines import Stub, line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "quickstart", "training.learning_rat=1"],
            "training.learning_rat = 1: unknown key; did you mean training.learning_rate?",
        ),
        (
            ["train", "quickstart", "training.group_size=1"],
            "training.group_size = 1: a group of one always has advantage 0 (its reward is the mean); "
            "set it to 2 or more",
        ),
        (
            ["train", "quickstart", "model.name=smollm"],
            "model.name = smollm: unknown model; did you mean smollm2-135m? give smollm2-135m, a Hub name like "
            "Qwen/Qwen2.5-7B-Instruct or a folder",
        ),
        (
            ["solve", "Why?", "--model", "runs/none"],
            "--model runs/none: no such folder; give a run folder, a model folder, smollm2-135m or a Hub name",
        ),
        (
            ["eval", "quickstart", "--model", "runs/none"],
            "--model runs/none: no such folder; give a run folder, a model folder, smollm2-135m or a Hub name",
        ),
        (
            ["train", "quickstart", "--resume"],
            "--resume: runs/quickstart-seed0 does not exist; leave out --resume (in Python resume=True) to start it, "
            "or name a run with --run-dir (runs here: none)",
        ),
        (
            ["train", "quickstart", "model.context_length=300", "agent.memory_tokens=300"],
            "model.context_length = 300: agent.memory_tokens (300) and agent.planner.max_tokens (",
        ),
        (
            ["train", "quickstart", "train_tasks.family=none.jsonl"],
            "none.jsonl: cannot read: No such file or directory; give a JSONL file of {id, question, answer, checker}",
        ),
        (["train", "quickstart", "--dry-run", "seed"], "override seed: no '='; write key=value, with no spaces"),
        (["train", "quickstrat"], "recipe quickstrat: no such file or recipe; did you mean quickstart?"),
        (["train", "quickstart", "training.steps", "=", "2"], "no '='; write key=value, with no spaces around '='"),
        (
            ["solve", "What", "is", "the", "training.steps=3", "capital"],
            "is: is no key=value, so quote the question: midflight solve 'What is the capital'",
        ),
        (["solve", " "], "QUESTION is empty; write what to ask, in quotes"),
        (["solve", "Why?", "training.steps=10"], "training.steps = 10: does nothing in midflight solve; leave it out"),
        (
            ["train", "quickstart", "sft.batch_size=4"],
            "sft.batch_size = 4: does nothing in midflight train; leave it out",
        ),
        (
            ["train", "quickstart", "sft.epochs=1"],
            "sft.epochs = 1: does nothing in midflight train; leave it out; did you mean training.epochs?",
        ),
        (
            ["sft", "quickstart", "training.group_size=4"],
            "training.group_size = 4: does nothing in midflight sft; leave it out",
        ),
        (
            ["sft", "quickstart", "train_tasks.split=validation"],
            "train_tasks.split = validation: does nothing in midflight sft; leave it out",
        ),
        (
            ["sft", "quickstart", "training.epochs=3"],
            "training.epochs = 3: does nothing in midflight sft; leave it out; did you mean sft.epochs?",
        ),
        (["solve", "Why?", "sft.epochs=1"], "sft.epochs = 1: does nothing in midflight solve; leave it out"),
        (
            ["eval", "quickstart", "--model", "smollm2-135m", "agent.max_turns=2", "training.curriculum=null"],
            "training.curriculum = null: does nothing in midflight eval; leave it out",
        ),
        (["report", "runs/none"], "run runs/none: no such folder; runs are made by midflight train"),
        (["sft", "quickstart"], "--from: missing; name a run whose trajectories to learn from"),
        (
            ["sft", "quickstart", "--from", "runs/none", "--phase", "trained"],
            "--phase trained: unknown; give train, before, after, interrupted or all",
        ),
        (["sft", "quickstart", "--from", "a", "--min-reward", "inf"], "--min-reward inf: must be a finite number"),
        (["sft", "quickstart", "--from", "a", "--per-question", "0"], "--per-question 0: must be 1 or more"),
        (["sft", "quickstart", "--from", "a", "--from", "./a"], "--from a: the same run is named twice; remove one"),
        (
            ["sft", "quickstart", "training.warmup_steps=500", "--from", "runs/none", "--dry-run"],
            "--from runs/none: no such folder; name a run",
        ),
        (["sft", "quickstart", "--from", "runs/none", "--dry-run"], "--from runs/none: no such folder; name a run"),
        (
            ["sft", "quickstart", "--resume", "--min-reward", "0"],
            "--min-reward: does nothing with --resume, as a run keeps its demonstrations; leave it out",
        ),
        (["sft", "quickstart", "--resume"], "--resume: runs/quickstart-sft-seed0 does not exist; leave out --resume"),
        (["sft", "quickstart", "sft.epoch=2"], "sft.epoch = 2: unknown key; did you mean sft.epochs?"),
        (["train"], "See midflight --help."),
        (["trian"], "See midflight --help."),
        (["train", "quickstart", "--resum"], "See midflight --help."),
        (["eval", "quickstart"], "--model: missing, as agent.planner.engine = null; name one, such as --model smollm2"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = line(capsys)
    assert printed.startswith("midflight: ")
    assert message in printed


@pytest.mark.usefixtures("no_work")
def test_an_unknown_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("midflight.recipe.rules.builtin_tools", lambda: ["calculator", "capital"])
    assert run(["train", "quickstart", "agent.tools=[capitol]"]) == 2
    assert line(capsys) == (
        "midflight: agent.tools = [capitol]: unknown tool capitol; did you mean capital? "
        "tools that exist: calculator, capital"
    )


@pytest.mark.usefixtures("no_work")
def test_a_task_file_that_cannot_be_read_names_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = '{"id": "1", "question": "a", "answer": "b", "checker": "exact"}'
    (folder / "q.jsonl").write_text(f"{good}\n{good[:-1]}\n")
    assert run(["train", "quickstart", "train_tasks.family=q.jsonl", "train_tasks.split=train"]) == 2
    assert "q.jsonl:2: not JSON: " in line(capsys)


@pytest.mark.usefixtures("no_work")
def test_a_run_that_exists_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs/quickstart-seed0").mkdir(parents=True)
    (folder / "runs/quickstart-seed0/recipe.yaml").write_text("name: x\n")
    assert run(["train", "quickstart"]) == 2
    assert line(capsys) == (
        "midflight: --run-dir runs/quickstart-seed0: exists and is not empty; to go on: "
        "midflight train runs/quickstart-seed0 --resume; or name another folder"
    )
    assert run(["report", "runs/quickstart-seed0"]) == 2
    assert "no report yet; finish it with: midflight train runs/quickstart-seed0 --resume" in line(capsys)
    (folder / "runs/other").mkdir()
    assert run(["report", "runs"]) == 2
    assert line(capsys) == "midflight: run runs: is not a run folder; runs in it: runs/quickstart-seed0"
    assert run(["report", "runs/other"]) == 2
    assert line(capsys) == "midflight: run runs/other: is not a run folder; runs in it: none"


@pytest.mark.usefixtures("no_work")
def test_a_run_goes_on_with_its_own_recipe_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = folder / "runs/quickstart-seed0"
    run_dir.mkdir(parents=True)
    assert run(["train", "quickstart", "--resume"]) == 2
    assert line(capsys) == (
        "midflight: --resume: runs/quickstart-seed0 holds no recipe.yaml, so no run; leave out --resume "
        "(in Python resume=True) to start one there, or name a run with --run-dir"
    )
    (run_dir / "notes.txt").touch()
    assert run(["train", "quickstart", "--resume"]) == 2
    assert line(capsys) == (
        "midflight: --resume: runs/quickstart-seed0 holds no recipe.yaml, so no run; name a run with --run-dir"
    )
    assert run(["train", "quickstart"]) == 2
    assert line(capsys) == (
        "midflight: --run-dir runs/quickstart-seed0: exists, is not empty and holds no recipe.yaml, so no run; "
        "name another folder"
    )
    (run_dir / "notes.txt").unlink()
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(resolved(load_recipe("quickstart"))))
    assert run(["train", "quickstart", "--resume", "training.steps=99"]) == 2
    assert line(capsys) == (
        f"midflight: training.steps = 99: the run in runs/quickstart-seed0 has "
        f"{load_recipe('quickstart').training.steps}; a run keeps its recipe: go on with midflight train "
        "runs/quickstart-seed0 --resume, or start another with --run-dir"
    )
    assert run(["train", "quickstart", "--resume", "model.lora=null"]) == 2
    assert "model.lora = null: the run in runs/quickstart-seed0 has {" in line(capsys)
    (run_dir / "recipe.yaml").write_text("name: [\n")
    assert run(["train", "quickstart", "--resume"]) == 2
    assert "recipe runs/quickstart-seed0/recipe.yaml, line 2: not YAML" in line(capsys)
    assert [file.name for file in run_dir.iterdir()] == ["recipe.yaml"]
    with pytest.raises(AssertionError, match="work has started"):
        (run_dir / "recipe.yaml").write_text(yaml.safe_dump(resolved(load_recipe("quickstart"))))
        run(["train", "runs/quickstart-seed0", "--resume"])


def test_errors_of_the_work_itself_are_one_line_too(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    def train(recipe: Any, *_: Any, **__: Any) -> None:
        raise UserError("not found\non the Hub") if recipe.seed == 0 else TrainingStopped("drift")

    stub("midflight.training.trainer", train=train)
    stub("midflight.progress", Progress=object)
    assert run(["train", "quickstart", "model.name=a/b"]) == 2
    assert line(capsys) == "midflight: not found on the Hub"
    assert run(["train", "quickstart", "seed=1"]) == 1
    assert line(capsys) == "midflight: drift"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "a/b"), "a/b: No space left on device; make room, then try again"),
        (OSError(27, "File too large"), "a file: File too large; make room, then try again"),
    ],
)
def test_a_full_disk_is_one_line(stub: Stub, error: OSError, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def evaluate_model(*_: Any) -> None:
        raise error

    stub("midflight.evaluation.held_out", evaluate_model=evaluate_model)
    stub("midflight.progress", Progress=object)
    assert run(["eval", "quickstart", "--model", "smollm2-135m"]) == 1
    assert line(capsys) == f"midflight: {said}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "quickstart", "training.st\x1b[2Jeps=1"], "training.st?[2Jeps = 1: unknown key; "),
        (["train", "a\x1b[31m\x00"], "recipe a?[31m?: no such file or recipe"),
        (["train", "a" * 5000], "File name too long"),
        (["train", "quickstart", "seed=" + "[" * 3000], "nested too deeply"),
        (["train", "quickstart", "seed=2024-99-99"], "a value cannot be read"),
        (["train", "quickstart", "seed=" + "9" * 5000], "a value cannot be read"),
        (["train", "quickstart", "training.refill_factor=1e308"], "training.refill_factor = 1.0e+308: "),
        (["train", "quickstart", "agent.planner.examples=~nouser/x"], "no such file"),
        (["train", "quickstart", "--run-dir", "/dev/null/x"], "--run-dir /dev/null/x: /dev/null is a file"),
        (["train", "quickstart", "--run-dir", "/proc/nope/x\x00"], "embedded null byte"),
    ],
)
def test_hostile_input_is_one_printable_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    line = capsys.readouterr().err
    assert said in line and line.startswith("midflight: ") and len(line) < 1200
    assert line.endswith("\n") and line[:-1].isprintable()


def test_a_folder_that_loops_or_a_pipe_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert run(["train", "quickstart", "--run-dir", str(loop)]) == 2
    os.mkfifo(tmp_path / "q.jsonl")
    source = [f"train_tasks.family={tmp_path / 'q.jsonl'}", "training.curriculum=null"]
    assert run(["train", "quickstart", *source, "--dry-run"]) == 2
    looped, pipe = capsys.readouterr().err.splitlines()
    assert looped.startswith(f"midflight: --run-dir {loop}: ") and "cannot read: not a regular file" in pipe
