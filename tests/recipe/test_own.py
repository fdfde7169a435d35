"""What a program gives as objects: its questions are kept with the run, its tools are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from midflight.api import recipe_for
from midflight.cli import run
from midflight.errors import UserError
from midflight.recipe import Recipe, RecipeError, load_recipe, resolved
from midflight.recipe.own import check_kept_tools, keep_tasks, keep_tools, own_tools, with_own_tasks
from midflight.recipe.resuming import first_change, read_recipe, save_recipe
from midflight.store import RunFolder
from midflight.tasks import Task, load_tasks
from midflight.tools import tool
from midflight.tools.calculator import calculator

TASKS = [Task(str(number), f"What is {number} + 1?", str(number + 1), "numeric") for number in range(4)]


@tool
def stock(item: str) -> int:
    """How many of an item there are."""
    return len(item)


@tool(name="calculator")
def counting(expression: str) -> int:
    """A calculator of its own."""
    return len(expression)


def recipe(*tools: object) -> Recipe:
    return recipe_for(tools, name="r", model="smollm2-135m", steps=2, max_turns=2)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path("r")).create()


def kept(folder: RunFolder, eval_tasks: list[Task]) -> Recipe:
    own = with_own_tasks(recipe(calculator), folder, TASKS[:3], eval_tasks)
    keep_tasks(folder, TASKS[:3], eval_tasks, resume=False)
    save_recipe(own, folder)
    return own


def test_the_recipe_names_the_questions_and_the_command_line_reads_them(folder: RunFolder) -> None:
    own = kept(folder, TASKS[3:])
    written = yaml.safe_load(folder.recipe.read_text())
    assert written["train_tasks"]["family"] == "inputs/train.jsonl"
    assert (written["eval_tasks"]["family"], written["eval_tasks"]["count"]) == ("inputs/eval.jsonl", None)
    read = load_recipe("r")
    assert read.eval_tasks is not None
    assert (load_tasks(read.train_tasks.family), load_tasks(read.eval_tasks.family)) == (TASKS[:3], TASKS[3:])
    assert first_change(read_recipe(folder.recipe), read) is None
    assert first_change(read_recipe(folder.recipe), own) is None


def test_without_held_out_questions_the_recipe_has_none(folder: RunFolder) -> None:
    own = kept(folder, [])
    assert load_recipe("r") == own and own.eval_tasks is None
    assert not folder.own_eval_tasks.exists()


def test_a_run_goes_on_with_the_same_questions_only(folder: RunFolder) -> None:
    kept(folder, TASKS[3:])
    keep_tasks(folder, TASKS[:3], TASKS[3:], resume=True)
    with pytest.raises(UserError, match=r"^tasks: not those of the run in r; a run keeps its questions: "):
        keep_tasks(folder, TASKS[1:3], TASKS[3:], resume=True)
    with pytest.raises(UserError, match=r"^eval_tasks: not those of the run in r; "):
        keep_tasks(folder, TASKS[:3], [Task("3", "What is 3 + 1?", "4")], resume=True)
    assert load_tasks(folder.own_tasks) == TASKS[:3]


def test_own_tools_are_those_in_use_that_are_not_built_in() -> None:
    assert own_tools(recipe(stock, calculator), [stock, calculator]) == ["stock"]
    assert own_tools(recipe(counting), [counting, stock]) == ["calculator"]
    assert own_tools(load_recipe("quickstart"), None) == []


@pytest.mark.parametrize(("own", "name"), [(stock, "stock"), (counting, "calculator")])
def test_a_command_does_not_go_on_without_the_tools_of_the_program(
    folder: RunFolder, own: object, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe(own)
    keep_tools(folder, own_tools(made, [own]))  # type: ignore[list-item]
    folder.recipe.write_text(yaml.safe_dump(resolved(made)))
    said = (
        "r: made with tools of a program: go on with your program, train_on(..., resume=True); "
        f"midflight.solve and midflight.credit take tools=[{name}]"
    )
    asked = ["train r --resume", "train r --dry-run", "solve Why? --model r", "eval r --model smollm2-135m"]
    for words in asked:
        assert run(words.split()) == 2
        assert capsys.readouterr() == ("", f"midflight: {said}\n")
    copy = Path("copy.yaml")
    copy.write_text(folder.recipe.read_text())
    if own is counting:
        assert run(["train", "copy.yaml", "--run-dir", "r", "--resume"]) == 2
        assert capsys.readouterr().err == f"midflight: {said}\n"
    with pytest.raises(RecipeError):
        check_kept_tools(folder, made, [])
    check_kept_tools(folder, made, [name])
    other = "capital"
    assert load_recipe("r", [f"agent.tools=[{other}]"]).agent.tools == (other,)
    assert run(["report", "r"]) == 2
    assert capsys.readouterr().err == (
        "midflight: run r: no report yet; finish it with: your program, train_on(..., resume=True)\n"
    )
