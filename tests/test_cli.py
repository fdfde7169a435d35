"""The command line: what is wrong is one line and exit code 2 before any work; the commands call what they should."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import midflight
from midflight.agent.types import Action, Answer, Query, StopReason, ToolResult, Trajectory, Turn, Verdict
from midflight.cli import run
from midflight.config import load_recipe, resolved
from midflight.engines.base import FinishReason, Generation
from midflight.engines.http import Ledger
from midflight.errors import TrainingStopped, UserError
from midflight.looping import loop_name
from tests.training.recorded import act, entry, record_run

Stub = Callable[..., types.ModuleType]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Put a module of given attributes in the place of a heavy one."""

    def put(name: str, **attributes: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_work(stub: Stub) -> None:
    """Any attempt to load a model or to train fails the test."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work has started")

    stub("midflight.training.trainer", train=never)
    stub("midflight.training.sft", sft=never)
    stub("midflight.building", build_agent=never)
    stub("midflight.evaluating", evaluate_model=never, listed_tasks=lambda source: [])
    stub("midflight.progress", Progress=object)


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing may be on stdout."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
    return printed.err.rstrip("\n")


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
    monkeypatch.setattr("midflight.recipe_rules.builtin_tools", lambda: ["calculator", "capital"])
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
        "midflight: --run-dir runs/quickstart-seed0: exists and is not empty; add --resume (in Python resume=True) "
        "to go on, or name another folder"
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
        "midflight: --resume: runs/quickstart-seed0 holds no recipe.yaml, so no run; name a run with --run-dir"
    )
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
    record_run(folder / "teacher", [entry(str(n), act("finish"), reward=n % 2) for n in range(40)])
    program = (
        "import sys; from midflight.cli import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); sys.exit(100 if heavy else code)"
    )
    arguments = ["sft", "quickstart", "--dry-run", "--from", "teacher", "sft.epochs=3", "sft.batch_size=8"]
    environment = {**os.environ, "PYTHONPATH": str(Path(midflight.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "  optimizer steps, at most    9  3 epochs x 3 batches\n" in done.stdout
    assert "  key-value cache, about" in done.stdout
    assert done.stdout.endswith(
        "\nDemonstrations\n  20 of 40 trajectories kept, of 20 questions; left out: reward below 1 20\n"
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

    stub("midflight.evaluating", evaluate_model=evaluate_model)
    stub("midflight.progress", Progress=object)
    assert run(["eval", "quickstart", "--model", "smollm2-135m"]) == 1
    assert line(capsys) == f"midflight: {said}"


@pytest.mark.parametrize("as_json", [False, True])
def test_eval_prints_a_table_or_json(stub: Stub, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stub("midflight.evaluating", evaluate_model=lambda recipe, model, progress: (f"{model} 50", {"n": 2}))
    stub("midflight.progress", Progress=object)
    assert run(["eval", "quickstart", "--model", "smollm2-135m", *(["--json"] if as_json else [])]) == 0
    assert capsys.readouterr().out == ('{"n": 2}\n' if as_json else "smollm2-135m 50\n")


@pytest.mark.usefixtures("no_work")
def test_dry_run_does_nothing_but_print(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "quickstart", "--dry-run", "training.queries_per_step=4", "training.group_size=2"]) == 0
    printed = capsys.readouterr().out
    assert "  queries_per_step: 4\n" in printed
    assert "4 queries x 2 trajectories" in printed
    assert "134.5M parameters, float32" in printed
    assert not list(folder.iterdir())


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
    stub("midflight.evaluating", evaluate_model=lambda recipe, model, progress: (recipe.model.dtype, {}))
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "quickstart", "training.steps=\x1b[2J"], "override training.steps=?[2J: "),
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
