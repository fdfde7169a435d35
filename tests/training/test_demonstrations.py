"""Which trajectories of which runs are learned from; no model is loaded."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.resuming import check_run_folder, made_by, save_recipe
from midflight.store import RunFolder, Store
from midflight.tasks.base import Task
from midflight.training.demonstrations import DEMONSTRATION, HELD_OUT, Selection, Wanted, keep, kept, select
from tests.training.recorded import AGENT, act, entry, record_run

RECIPE = load_recipe("quickstart", ["agent.grounded=false"])
LOOK, END = act("capital", "Peru"), act("finish")


def chosen(run: Path, recipe: Recipe = RECIPE, held_out: tuple[str, ...] = (), **wanted: Any) -> Selection:
    return select(Wanted((run,), **wanted), recipe, [Task(text, text, "x") for text in held_out])


def refused(run: Path, *arguments: Any, **wanted: Any) -> str:
    with pytest.raises(UserError) as caught:
        chosen(run, *arguments, **wanted)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def questions(selection: Selection) -> list[str]:
    return [record.trajectory.query.text for record in selection.records]


def test_phase_and_reward_choose_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    run = record_run(
        tmp_path / "run",
        [
            entry("a", LOOK, END),
            entry("a", LOOK, reward=0.5),
            entry("b", LOOK, reward=0.0),
            entry("c", LOOK, reward=None),
            entry("d", LOOK, END, phase="after"),
            entry("e", LOOK, END, phase=DEMONSTRATION),
        ],
    )
    found = chosen(run)
    assert questions(found) == ["a"]
    assert found.left_out == {"reward below 1": 2, "without a reward": 1}
    assert found.line() == (
        "1 of 4 trajectories kept, of 1 questions; left out: reward below 1 2, without a reward 1"
    )  # fmt: skip
    assert questions(chosen(run, min_reward=0.5)) == ["a", "a"]
    assert questions(chosen(run, phase="after")) == ["d"]
    assert questions(chosen(run, phase="all")) == ["a", "d"]  # not what a supervised run was shown itself
    other = record_run(tmp_path / "other", [entry("z", LOOK, END)])
    both = select(Wanted((other, run)), RECIPE, [])
    assert questions(both) == ["z", "a"] and both.records[0].trajectory.turns[0].action == LOOK


def test_held_out_questions_are_never_learned_from(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", [entry("What is  it?", LOOK), entry("What is it", LOOK), entry("b", LOOK)])
    found = chosen(run, held_out=("what is it? ", "c"))
    assert questions(found) == ["What is it", "b"]
    assert found.left_out == {HELD_OUT: 1}
    assert refused(run, held_out=("what is it?", "what is it", "B")) == (
        "nothing to learn from: 0 of 3 trajectories kept, of 0 questions; left out: held out for evaluation 3; name "
        "another run with --from, or set another --phase or --min-reward"
    )


def test_runs_that_cannot_be_learned_from_are_one_line(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == f"--from {tmp_path}/none: no such folder; name a run"
    assert refused(tmp_path) == f"--from {tmp_path}: holds no store.sqlite, so no run; name a run"
    assert not (tmp_path / "store.sqlite").exists()
    run = record_run(tmp_path / "run", [entry("a", LOOK, phase="before"), entry("a", LOOK, reward=None)])
    assert refused(run) == f"--from {run}: none of its 1 trajectories has a reward; name another run"
    assert refused(run, phase="after") == (
        f"--from {run}: no trajectories of phase after; it has 1 before, 1 train; set another --phase"
    )
    empty = record_run(tmp_path / "empty", [])
    assert refused(empty, phase="all") == (
        f"--from {empty}: no trajectories of phase all; it has none; set another --phase"
    )
    (tmp_path / "bare").mkdir()
    Store(tmp_path / "bare/store.sqlite").close()
    assert refused(tmp_path / "bare") == f"--from {tmp_path}/bare: its store holds no run; name another run"
    strange = record_run(tmp_path / "strange", [entry("a", LOOK)], {"name": "x"})
    assert refused(strange) == f"{strange}/store.sqlite: cannot be read (KeyError: 'agent'); name another run"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert refused(loop) == f"--from {loop}: no such folder; name a run"
    (tmp_path / "text").mkdir()
    (tmp_path / "text/store.sqlite").write_text("this is no database, and it is long enough to be read as one" * 9)
    assert "cannot be used as a store" in refused(tmp_path / "text")
    with sqlite3.connect(run / "store.sqlite") as store:
        store.execute("UPDATE turns SET ids = x'00'")
    assert refused(run, phase="before").startswith(f"{run}/store.sqlite: trajectory 1 cannot be read (error: Error -")


def test_options_that_can_mean_nothing_are_one_line(tmp_path: Path) -> None:
    for wanted, said in (
        ({"sources": ()}, "--from: missing; name a run whose trajectories to learn from"),
        (
            {"sources": (tmp_path, tmp_path / "x" / "..")},
            f"--from {tmp_path}: the same run is named twice; remove one",
        ),
        ({"phase": "trained"}, "--phase trained: unknown; give train, before, after, interrupted or all"),
        ({"min_reward": float("nan")}, "--min-reward nan: must be a finite number"),
        ({"per_question": 0}, "--per-question 0: must be 1 or more; leave it out to take all"),
    ):
        with pytest.raises(UserError) as caught:
            Wanted(**{"sources": (tmp_path,), **wanted})  # type: ignore[arg-type]
        assert str(caught.value) == said


def test_contexts_that_mean_something_else_to_the_recipe_are_refused(tmp_path: Path) -> None:
    recipe = {"agent": {"executor": {"kind": "llm"}, "grounded": False}}
    run = record_run(tmp_path / "llm", [entry("a", LOOK)], recipe)
    assert refused(run) == (
        f"agent.executor.kind = direct: the planner of --from {run} wrote for the kind llm; set "
        "agent.executor.kind=llm or name another run"
    )
    grounded = {"agent": {**AGENT["agent"], "grounded": True}}
    run = record_run(tmp_path / "named", [entry("a", LOOK, act("capital", "#1"))], grounded)
    assert refused(run) == (
        f"agent.grounded = false: the planner of --from {run} names results as #n; set agent.grounded=true or name "
        "another run"
    )
    assert questions(chosen(run, load_recipe("quickstart"))) == ["a"]
    assert questions(chosen(record_run(tmp_path / "plain", [entry("a", LOOK)], grounded))) == ["a"]
    overrides = ["training.kl_beta=0.1", "training.kl_in=reward"]
    assert refused(run, load_recipe("quickstart", overrides)) == (
        "training.kl_in = reward: demonstrations have no reward to take it off; set training.kl_in=loss or "
        "training.kl_beta=0"
    )


def test_a_run_keeps_its_demonstrations_and_is_known_by_them(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", [entry("a", LOOK, END), entry("b", "nonsense", LOOK), entry("c", reward=0.0)])
    wanted = Wanted((run,), per_question=3)
    selection = select(wanted, RECIPE, [])
    folder = RunFolder(tmp_path / "sft")
    keep(folder, RECIPE, wanted, selection)
    save_recipe(RECIPE, folder)
    again = kept(folder)
    assert [one.trajectory for one in again.records] == [one.trajectory for one in selection.records]
    assert [(one.phase, one.step, one.reward) for one in again.records] == [(DEMONSTRATION, None, 1.0)] * 2
    assert json.loads(folder.demonstrations.read_text()) == {
        "sources": [str(run)], "phase": "train", "min_reward": 1.0, "per_question": 3, "kept": 2,
        "left_out": {"reward below 1": 1},
    }  # fmt: skip
    with Store(folder.store) as store:
        assert store.drop_steps_from(store.runs()[-1].id, 1) == 0 and len(kept(folder).records) == 2
    assert (made_by(folder.path), made_by(run)) == ("sft", "train")
    check_run_folder(folder.path, RECIPE, resume=True, command="sft")
    with pytest.raises(UserError) as caught:
        check_run_folder(folder.path, RECIPE, resume=True)
    assert str(caught.value) == (
        f"--resume: the run in {folder.path} was made by midflight sft; go on with midflight sft {folder.path} --resume"
    )
    with pytest.raises(UserError, match=f"go on with midflight sft {folder.path} --resume, or start another"):
        check_run_folder(folder.path, load_recipe("quickstart"), resume=True, command="sft")
