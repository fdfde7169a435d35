"""`midflight credit` on a small store, with a scripted agent in the place of the model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import midflight
from midflight.agent import AgentFlow, Query, StopReason, Trajectory
from midflight.api import credit
from midflight.cli import run
from midflight.engines.base import EngineError, GenerateRequest
from midflight.errors import UserError
from midflight.evaluation import monte_carlo_credit
from midflight.recipe import load_recipe, resolved
from midflight.rewards import score
from midflight.store import NewTrajectory, Store
from midflight.tasks.base import Task
from midflight.tools.base import ErrorKind
from tests.agent.doubles import BoxTool, compact_flow, population, user_parts
from tests.evaluation.build import trajectory, turn

PERU = Task("peru", "How many people live in Peru?", "32933835", kind="population")
RIGHT = ("population: Peru", "finish")
WRONG = ("population: Chad", "finish")


def made(*actions: str, seed: int = 0, ids: bool = True) -> Trajectory:
    """What the agent makes of these actions; turn t has the prompt ids 1 to t of what was done before."""
    done = asyncio.run(compact_flow(actions)[0].run(Query(PERU.question, PERU.id, seed)))
    seen = [hash_of(actions[:place]) for place in range(len(done.turns))]
    turns = (
        replace(made, generation=replace(made.generation, prompt_ids=(number,) if ids else ()))
        for made, number in zip(done.turns, seen, strict=True)
    )
    return replace(done, turns=tuple(turns), seconds=0.0)


def hash_of(actions: tuple[str, ...]) -> int:
    return sum(map(ord, "".join(actions)))


def new(of: Trajectory, reward: float | None, step: int | None = 1, **changes: Any) -> NewTrajectory:
    stored = NewTrajectory(phase="train", step=step, group="peru", member=0, task=PERU, trajectory=of, reward=reward)
    return replace(stored, **changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a run `r` of eight trajectories."""
    monkeypatch.chdir(tmp_path)
    failed = replace(made("finish"), stop_reason=StopReason.INFRASTRUCTURE, answer=None, error="planner failed: gone")
    lost = trajectory(turn(1, "population", "Peru", "no", ErrorKind.TOOL_ERROR), stop=StopReason.CONTEXT_OVERFLOW)
    unknown = replace(PERU, checker="gone")
    with Store(tmp_path / "r/store.sqlite") as store:
        run_id = store.start_run("quickstart", {}, 7)
        store.add_trajectories(
            run_id,
            [
                new(made(*RIGHT), 1.0, None, phase="before"),
                new(made(*RIGHT), 1.0),
                new(made(*WRONG), 0.0),
                new(made("population: Peru", "population: Chad", "finish"), 0.0),
                new(failed, None),
                new(replace(lost, turns=()), 0.0, 2),
                new(made(*RIGHT, ids=False), 1.0, 2),
                new(made(*RIGHT), 1.0, None, phase="after", task=unknown),
            ],
        )
    (tmp_path / "r/recipe.yaml").write_text(
        yaml.safe_dump(resolved(load_recipe("quickstart", ["seed=7", "evaluation.concurrency=3"])))
    )
    return tmp_path


class Builder:
    """Stands for `midflight.building`: always asks for Peru, then finishes; where `down`, cannot."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.closed = self.running = self.most = 0
        self.down = False
        self.tools: list[Any] = [population()]

    def flow(self) -> AgentFlow:
        def act(request: GenerateRequest) -> str | Exception:
            done = "".join(user_parts(request)[1:-1])
            if self.down and not done:
                return EngineError("down")
            return "finish" if "Turn 1" in done else "population: Peru"

        return compact_flow(act, *self.tools, retries=0)[0]

    def build_agent(self, recipe: Any, model: str, *, tools: Any, training: bool) -> Any:
        self.calls.append((recipe.seed, model, tools, training))
        return types.SimpleNamespace(flow=types.SimpleNamespace(run=self.run), close=self.close)

    async def run(self, query: Query, **begun: Any) -> Trajectory:
        self.running += 1
        self.most = max(self.most, self.running)
        done = await self.flow().run(query, **begun)
        self.running -= 1
        return done

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Builder]:
    stand_in = Builder()
    module = types.ModuleType("midflight.building")
    module.build_agent = stand_in.build_agent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "midflight.building", module)
    monkeypatch.setattr("midflight.loading.trained_folder", lambda path, say: path / "checkpoints/step-00009")
    yield stand_in
    assert stand_in.closed == len(stand_in.calls)


def test_the_wrong_turn_is_marked(folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credit", "3", "--run", "r"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        "Trajectory 3 (train, step 1, group peru)\n"
        "  Question  How many people live in Peru?\n"
        "  Answer    17179740   [stopped: finished, reward 0]\n"
        "\n"
        "   turn  action            result               before  after                change     group  group change\n"
        "-  ----  ----------------  --------  -----------------  -----  --------------------  --------  ------------\n"
        "*  1     population: Chad  17179740  1.00 [0.81, 1.00]   0.00  -1.00 [-1.00, -0.66]  0.33 (3)         -0.33\n"
        "   2     finish                      0.00 [0.00, 0.19]   0.00  +0.00 [-0.24, +0.00]  0.00 (1)         +0.00\n"
        "\n"
        "* Turning point: turn 1 (population: Chad) changed the expected reward by -1.00 [-1.00, -0.66].\n"
        "\n"
        "Before, after: mean reward of 16 continuations of the state by r/checkpoints/step-00009 at the training\n"
        "temperature 1, seed 7, with 95 % intervals; after the last turn the trajectory's own reward. Change: its\n"
        "interval is at 95 % for all turns together.\n"
        "Group: mean reward of the members of its group that were in the state before the turn, and how many; "
        "where it\nwas alone (1) that is its own reward.\n"
    )
    assert printed.err.startswith("loading r/checkpoints/step-00009\ncontinuing: ")
    assert "continuing: 32/32" in printed.err
    assert builder.calls == [(7, "r/checkpoints/step-00009", (), True)]
    assert builder.most == 3


def test_undecided(folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credit", "2", "--run", "r", "--continuations", "3", "--model", "a/b", "--seed", "0"]) == 0
    printed = capsys.readouterr().out
    assert (
        "\nUndecided: no change has an interval without 0. More continuations narrow the intervals (--continuations, "
        in printed
    )
    assert "mean reward of 3 continuations of the state by a/b at the training temperature 1, seed 0" in " ".join(
        printed.split()
    )
    assert builder.calls == [(7, "a/b", (), True)]


def test_lost_continuations_are_counted_and_what_they_leave_open_is_a_dash(
    folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    builder.down = True
    assert run(["credit", "3", "--run", "r", "--continuations", "4"]) == 0
    printed = capsys.readouterr().out
    first, second = (line.split() for line in printed.splitlines()[6:8])
    assert first == ["1", "population:", "Chad", "17179740", "-", "0.00", "-", "0.33", "(3)", "-0.33"]
    assert second[:6] == ["2", "finish", "0.00", "[0.00,", "0.49]", "0.00"]
    assert (
        "\n4 of 8 continuations ended in infrastructure failures and are left out, most often: planner failed 1 "
        "times:\ndown\n" in printed
    )


def test_where_every_continuation_is_lost_nothing_is_said_but_why(
    folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(folder / "r/store.sqlite") as store:
        store.add_trajectories(1, [new(made("finish"), 0.0, 2)])
    builder.down = True
    assert run(["credit", "9", "--run", "r", "--continuations", "4"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines()[-1] == (
        "midflight: trajectory 9: nothing was measured: 4 of 4 trajectories were lost to infrastructure failures: "
        "planner failed 1 times: down"
    )


def with_box(folder: Path) -> None:
    """Trajectory 9 puts something in a box, then asks for Peru."""
    boxed = asyncio.run(
        compact_flow(["box: put gold", "population: Peru", "finish"], BoxTool(), population())[0].run(Query("Q?"))
    )
    with Store(folder / "r/store.sqlite") as store:
        store.add_trajectories(1, [new(boxed, 1.0, 2)])


def test_a_state_that_was_not_restored_is_said(
    folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    with_box(folder)
    command = ["credit", "9", "--run", "r", "--continuations", "4"]
    builder.tools = [BoxTool(), population()]
    assert run(command) == 0
    assert "Not the recorded state" not in capsys.readouterr().out
    builder.tools = [BoxTool(extra="!"), population()]
    assert run(command) == 0
    assert (
        " Not the recorded state: calls that were made again to restore what their tools hold gave another result "
        "than the recorded one, in turn 1 (box: put gold): 8 of 8 continuations from behind the turn. Values after the "
        "first of these turns are of the recorded memory with what the tools held then. Before, after: "
    ) in " ".join(capsys.readouterr().out.split())


def test_a_trajectory_whose_calls_cannot_be_made_again_is_refused(
    folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    with_box(folder)
    assert run(["credit", "9", "--run", "r", "--continuations", "4"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines()[-1] == (
        "midflight: trajectory 9: cannot be continued: the call of box in turn 1 cannot be made again: no tool named "
        "'box'; valid names: population, finish; use --group-only"
    )
    assert run(["credit", "9", "--run", "r", "--group-only"]) == 0


def test_json_is_the_apis_figures(folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credit", "4", "--run", "r", "--continuations", "2", "--json", "--plot", "c.png"]) == 0
    data = json.loads(capsys.readouterr().out)
    with Store(folder / "r/store.sqlite") as store:
        group = store.trajectories(1, "train", 1)
    expected = asyncio.run(
        monte_carlo_credit(builder.flow(), group[2], continuations=2, score=score, seed=7, group=group)
    )
    assert data == {
        "phase": "train",
        "step": 1,
        "group": "peru",
        "question": PERU.question,
        "actions": ["population: Peru", "population: Chad", "finish"],
        "model": "r/checkpoints/step-00009",
        "temperature": 1.0,
        "continuations": 2,
        "seed": 7,
        **expected.to_json(),
    }
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")
    assert credit("r", 4, continuations=2) == expected
    assert (
        credit("r", 4, continuations=2, tools=[population()], model="m/n", seed=3).turns[1].before
        == expected.turns[1].before
    )
    assert builder.calls[1:] == [(7, "r/checkpoints/step-00009", (), True), (7, "m/n", [population()], True)]
    with pytest.raises(UserError, match="continuations = 0: a state's value needs at least 1"):
        credit("r", 4, continuations=0)


def test_group_only(folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credit", "4", "--run", "r", "--group-only"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[4:-2] == [
        "  turn  action            result       group  group change",
        "  ----  ----------------  --------  --------  ------------",
        "  1     population: Peru  32933835  0.33 (3)         +0.17",
        "  2     population: Chad  17179740  0.50 (2)         -0.50",
        "  3     finish                      0.00 (1)         +0.00",
        "",
        "By the group alone the largest change is -0.50 in turn 2; it has no interval, so no turning point is named.",
        "",
    ]
    assert run(["credit", "1", "--run", "r", "--group-only"]) == 0
    assert "The group says nothing: the trajectory was alone in every state.\n" in capsys.readouterr().out
    assert run(["credit", "7", "--run", "r", "--group-only"]) == 0
    assert "The group says nothing: the planner's engine gave no prompt ids" in capsys.readouterr().out
    assert run(["credit", "8", "--run", "r", "--group-only", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["model"], data["seed"], data["turning_point"], data["turns"][0]["before"]) == (None, None, None, None)
    assert builder.calls == []


def test_the_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credit", "--run", "r", "--phase", "train", "--step", "1"]) == 0
    assert capsys.readouterr().out == (
        "id  phase  step  question                       turns         stopped  reward\n"
        "--  -----  ----  -----------------------------  -----  --------------  ------\n"
        "2   train  1     How many people live in Peru?      2        finished       1\n"
        "3   train  1     How many people live in Peru?      2        finished       0\n"
        "4   train  1     How many people live in Peru?      3        finished       0\n"
        "5   train  1     How many people live in Peru?      1  infrastructure       -\n"
        "\n"
        "The last 4; ids in the run: before 1 to 1, train 2 to 7, after 8 to 8. Narrow with --phase and --step.\n"
    )
    assert run(["credit", "--run", "r", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [line["id"] for line in listed] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert listed[0] == {
        "id": 1,
        "phase": "before",
        "step": None,
        "group": "peru",
        "question": PERU.question,
        "turns": 2,
        "stop_reason": "finished",
        "reward": 1.0,
    }
    with Store(folder / "r/store.sqlite") as store:
        store.add_trajectories(1, [new(made(*RIGHT), 1.0, 2)] * 40)
    assert run(["credit", "--run", "r"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 34 and lines[2].startswith("19  train  2 ") and lines[31].startswith("48  train  2 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["9"], "trajectory 9: run r has 1 to 8; list them with: midflight credit --run r"),
        (["0"], "trajectory 0: run r has 1 to 8; "),
        (["9" * 30], f"trajectory {'9' * 30}: run r has 1 to 8; "),
        (
            ["5"],
            "trajectory 5: an infrastructure failure ended it (planner failed: gone), so it has no reward; take "
            "another",
        ),
        (["6"], "trajectory 6: it has no turns; take another"),
        (["8"], "trajectory 8: its continuations cannot be scored: unknown checker 'gone'; valid: exact, numeric; "),
        (["--phase", "trian"], "--phase trian: run r has before, train, after"),
        (["--step", "9"], "--step 9: run r has steps 1 to 2"),
        (["--step", "9" * 30], f"--step {'9' * 30}: run r has steps 1 to 2"),
        (["--phase", "after", "--step", "1"], "--step 1: run r has no steps in phase after"),
        (["3", "--step", "1"], "--step: filters the list; leave it out with a TRAJECTORY"),
        (["3", "--phase", "train"], "--phase: filters the list; leave it out with a TRAJECTORY"),
        (["--seed", "0"], "--seed: needs a TRAJECTORY; give its id"),
        (["--group-only"], "--group-only: needs a TRAJECTORY; give its id"),
        (["--plot", "x.png"], "--plot: needs a TRAJECTORY; give its id"),
        (["3", "--group-only", "--seed", "0"], "--seed: does nothing with --group-only; leave one of them out"),
        (["3", "--group-only", "--model", "a/b"], "--model: does nothing with --group-only; leave one of them out"),
        (["3", "--continuations", "0"], "--continuations"),
        (["3", "--model", "runs/none"], "--model runs/none: no such folder; "),
        (["3", "--plot", "x.jpg"], "--plot x.jpg: a PNG is written; end the name in .png"),
        (["3", "--plot", "no/x.png"], "--plot no/x.png: its folder does not exist; name a file"),
        (["three"], "See midflight --help."),
    ],
)
@pytest.mark.usefixtures("folder")
def test_bad_input_is_one_line_and_no_work(
    arguments: list[str], message: str, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["credit", *arguments, "--run", "r"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("midflight: ") and message in printed.err
    assert builder.calls == []


def test_folders_that_are_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    Store(folder / "new/store.sqlite").close()
    for name in ("none", "empty", "new"):
        assert run(["credit", "--run", name]) == 2
    (folder / "r/recipe.yaml").unlink()
    (folder / "x.png").mkdir()
    assert run(["credit", "3", "--run", "r"]) == 2
    assert run(["credit", "3", "--run", "r", "--plot", "x.png"]) == 2
    assert run(["credit", "3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "midflight: --run none: no such folder; runs are made by midflight train",
        "midflight: --run empty: holds no store.sqlite, so no trajectories; name a run folder",
        "midflight: --run new: no trajectories yet; let it train: midflight train new --resume",
        "midflight: recipe r/recipe.yaml: cannot be read: [Errno 2] No such file or directory: 'r/recipe.yaml'",
        "midflight: --plot x.png: is a folder; name a file",
        "midflight: Missing option '--run'. See midflight --help.",
    ]
    assert not (folder / "none").exists() and not list((folder / "empty").iterdir())


def test_a_run_with_own_tools_needs_them(folder: Path, builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load((folder / "r/recipe.yaml").read_text())
    recipe["agent"]["tools"] = ["people"]
    (folder / "r/recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run(["credit", "3", "--run", "r"]) == 2
    assert "agent.tools = [people]: unknown tool people; " in capsys.readouterr().err
    own = replace(population(), name="people")
    assert credit("r", 3, tools=[own]).turning_point is not None
    assert builder.calls[0][2] == [own]


@pytest.mark.parametrize("arguments", [["credit", "--run", "r"], ["credit", "3", "--run", "r", "--group-only"]])
def test_what_needs_no_model_imports_no_torch(arguments: list[str], folder: Path) -> None:
    program = (
        "import sys; from midflight.cli import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); sys.exit(100 if heavy else code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(midflight.__file__).parent.parent)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
