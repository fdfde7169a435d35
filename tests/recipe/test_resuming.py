"""A run keeps its recipe, and copies of the files it names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from midflight.errors import UserError
from midflight.recipe import Recipe, load_recipe
from midflight.recipe.own import keep_tools
from midflight.recipe.resuming import begin, check_run_folder, first_change, read_recipe, save_recipe
from midflight.recipe.validating import show
from midflight.store import RunFolder, Store


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    file = tmp_path / "mine.txt"
    file.write_text("Question: x\nTurn 1: finish\n")
    return file


def recipe(examples: Path) -> Recipe:
    return load_recipe("quickstart", [f"agent.planner.examples={examples}", "training.steps=3"])


def test_a_moved_run_reads_its_own_copies(examples: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    save_recipe(recipe(examples), folder)
    moved = tmp_path / "elsewhere" / "run"
    shutil.move(folder.path, moved.parent / "run")
    examples.unlink()
    own = load_recipe(str(moved))
    assert own.agent.planner.examples == str(moved.resolve() / "inputs" / "agent-planner-mine.txt")
    assert Path(own.agent.planner.examples).read_text() == "Question: x\nTurn 1: finish\n"
    assert own.training.steps == 3
    save_recipe(own, RunFolder(moved))  # as a resume does
    assert load_recipe(str(moved)) == own


def test_files_are_compared_by_what_they_hold(examples: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    save_recipe(recipe(examples), folder)
    assert first_change(read_recipe(folder.recipe), recipe(examples)) is None
    check_run_folder(folder.path, recipe(examples), resume=True)
    examples.write_text("Question: y\nTurn 1: finish\n")
    assert first_change(read_recipe(folder.recipe), recipe(examples)) == (
        "agent.planner.examples",
        str(folder.inputs.resolve() / "agent-planner-mine.txt"),
        str(examples),
    )
    with pytest.raises(UserError) as caught:
        check_run_folder(folder.path, recipe(examples), resume=True)
    own = folder.inputs.resolve() / "agent-planner-mine.txt"
    assert str(caught.value).startswith(
        f"agent.planner.examples = {show(str(examples))}: the run in {folder.path} has {show(str(own))}; "
        "a run keeps its recipe: go on with "
    )


def test_a_resume_does_not_write_a_copy_that_is_there(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run").create()
    save_recipe(recipe(examples), folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    save_recipe(recipe(examples), folder)
    assert (folder.inputs / "agent-planner-mine.txt").read_text() == examples.read_text()


def test_one_process_at_a_time_trains_in_a_folder(examples: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    save_recipe(recipe(examples), folder)
    with folder.locked():
        with pytest.raises(UserError, match=f"--run-dir {folder.path}: another process is training there; let it end"):
            check_run_folder(folder.path, recipe(examples), resume=True)
    check_run_folder(folder.path, recipe(examples), resume=True)


def test_a_run_that_was_killed_before_it_began_is_begun_again(examples: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    check_run_folder(folder.path, recipe(examples), resume=False)
    begin(folder)
    keep_tools(folder, ["stock"])
    folder.demonstrations.write_text("{}")
    with Store(folder.store) as store:
        store.start_run("other", {}, 0)
    with pytest.raises(UserError, match="holds no recipe.yaml, so no run; leave out --resume .* to start one there"):
        check_run_folder(folder.path, recipe(examples), resume=True)
    check_run_folder(folder.path, recipe(examples), resume=False)
    begin(folder)
    assert sorted(file.name for file in folder.path.rglob("*") if file.is_file()) == [".recipe.yaml"]
    save_recipe(recipe(examples), folder)
    assert not folder.beginning.exists()
    check_run_folder(folder.path, recipe(examples), resume=True)
    folder.beginning.touch()  # a resume that is killed while it writes the recipe
    for start in (lambda: check_run_folder(folder.path, recipe(examples), resume=False), lambda: begin(folder)):
        with pytest.raises(UserError, match="exists and is not empty; to go on: midflight train "):
            start()


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints/notes.txt", "inputs/eval.jsonl", "store.sqlite"])
def test_files_that_no_run_began_with_are_left_alone(name: str, examples: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    (folder.path / name).parent.mkdir(exist_ok=True)
    (folder.path / name).write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no recipe.yaml, so no run; name another folder"):
        begin(folder)
    assert (folder.path / name).read_text() == "mine" and not folder.beginning.exists()


def test_a_change_of_what_may_be_a_key_is_named_and_not_shown(tmp_path: Path) -> None:
    def own(header: str) -> Recipe:
        server = f"{{url: 'http://127.0.0.1:1/mcp', headers: {{Authorization: {header}}}}}"
        return load_recipe("quickstart", [f"agent.mcp_servers.shop={server}"])

    folder = RunFolder(tmp_path / "run").create()
    save_recipe(own("FIRST"), folder)
    with pytest.raises(UserError) as caught:
        check_run_folder(folder.path, own("SECOND"), resume=True)
    assert str(caught.value).startswith(
        f"agent.mcp_servers.shop.headers.Authorization: the run in {folder.path} has another; a run keeps its "
    )
