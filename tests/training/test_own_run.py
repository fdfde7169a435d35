"""Runs of a program's own questions and tools on a model of a few random weights: resumed, finished, moved, asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from midflight import solve, train_on
from midflight.agent.types import Turn
from midflight.cli import run
from midflight.errors import UserError
from midflight.store import RunFolder, Store, read_metrics
from midflight.tasks import Task
from midflight.tools import tool
from midflight.tools.calculator import calculator
from midflight.training import session, trainer
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

TASKS = [Task(str(number), f"What is {number} + 1?", str(number + 1), "numeric") for number in range(4)]
SMALL = [
    "model.chat_template=false",
    "model.context_length=1024",
    "agent.memory_tokens=48",
    "agent.planner.max_tokens=12",
    "agent.grounded=true",
    "training.queries_per_step=2",
    "training.group_size=3",
    "training.save_every=1",
]


@tool(blocking=False)
def stock(item: str) -> int:
    """How many of an item there are."""
    return len(item)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(run_dir: str, model: Path, tools: list[Any], eval_tasks: list[Task], **settings: Any) -> Any:
    named = {"steps": 2, "max_turns": 2, "overrides": SMALL, **settings}
    return train_on(TASKS[:3], tools, run_dir=run_dir, model=str(model), eval_tasks=eval_tasks, **named)


def drawn(run_dir: str) -> list[Any]:
    with Store(RunFolder(Path(run_dir)).store) as store:
        records = store.trajectories(1)
    return [
        (one.phase, one.step, one.task, one.reward, [turn.generation.text for turn in one.trajectory.turns])
        for one in records
    ]


def test_the_command_goes_on_with_the_questions_of_the_program_and_a_finished_run_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program("whole", model, [calculator], TASKS[3:])
    real = trainer.Trainer._step

    def cut(self: Any, store: Any, run_id: int, step: int) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return real(self, store, run_id, step)

    monkeypatch.setattr(trainer.Trainer, "_step", cut)
    with pytest.raises(KeyboardInterrupt):
        program("cut", model, [calculator], TASKS[3:])
    monkeypatch.setattr(trainer.Trainer, "_step", real)
    capsys.readouterr()
    assert run(["train", "cut", "--resume"]) == 0
    printed = capsys.readouterr()
    assert "resuming cut after step 1" in printed.err
    assert drawn("cut") == drawn("whole")
    first = read_metrics("cut/metrics.jsonl")[0]["seconds"]
    took = next(text for text in printed.out.splitlines() if text.startswith("took "))
    assert took.endswith(f" s, {first:.0f} s of it in steps of earlier sessions")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(session, "load_trained", never)
    before = {file: file.read_bytes() for file in Path("cut").rglob("*") if file.is_file()}
    assert run(["train", "cut", "--resume"]) == 0
    assert capsys.readouterr() == (printed.out, "cut is finished: nothing to do\n")
    report = program("cut", model, [calculator], TASKS[3:], resume=True)
    assert (report.steps, report.after.n) == (2, 1) and f"took {report.seconds:.0f} s" in took
    assert {file: file.read_bytes() for file in Path("cut").rglob("*") if file.is_file()} == before
    with pytest.raises(UserError, match="^eval_tasks: not those of the run in cut; "):
        program("cut", model, [calculator], [Task("3", "What is 4 + 1?", "5")], resume=True)

    shutil.move("cut", "moved")
    capsys.readouterr()
    assert run(["report", "moved"]) == 0
    moved = capsys.readouterr().out
    assert "\nrun folder: moved\nplots: moved/plots (" in moved and moved.endswith(" --model moved\n")
    assert moved.splitlines()[:-3] == printed.out.splitlines()[:-3]

    (Path("moved/checkpoints/step-00002/state.json")).unlink()
    with pytest.raises(AssertionError, match="a model is loaded"):  # its last step is lost: it is made again
        run(["train", "moved", "--resume"])


def test_own_tools_are_marked_and_solve_takes_them(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program("run", model, [stock], TASKS[3:])
    assert RunFolder(Path("run")).own_tools.read_text() == '["stock"]\n'
    capsys.readouterr()
    assert run(["report", "run"]) == 0
    assert capsys.readouterr().out.endswith("\ntry next: midflight.solve('What is 3 + 1?', 'run', tools=[stock])\n")
    assert run(["train", "run", "--resume"]) == 2
    assert "run: made with tools of a program: go on with your program" in capsys.readouterr().err
    turns: list[Turn] = []
    asked = solve("What is 3 + 1?", "run", tools=[stock], on_turn=turns.append)
    assert turns and list(asked.turns) == turns and asked.query.text == "What is 3 + 1?"
    with Store(RunFolder(Path("run")).store) as store:
        (after,) = store.trajectories(1, "after")
    assert [turn.generation.text for turn in asked.turns] == [turn.generation.text for turn in after.trajectory.turns]
    with pytest.raises(UserError, match="^run: made with tools of a program: "):
        solve("What is 3 + 1?", "run")
    with pytest.raises(UserError, match="^tools: calculator does nothing, as run has stock; leave it out$"):
        solve("What is 3 + 1?", "run", tools=[stock, calculator])


def test_a_run_without_held_out_questions_goes_on_without_any(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program("run", model, [calculator], [])
    shutil.rmtree("run/checkpoints/step-00002")
    capsys.readouterr()
    assert run(["train", "run", "--resume"]) == 0
    printed = capsys.readouterr()
    assert "resuming run after step 1" in printed.err and "evaluating" not in printed.err
    assert printed.out == "run has no held-out questions, so no report; its steps are in run/metrics.jsonl\n"
    assert {one[0] for one in drawn("run")} == {"train"}
