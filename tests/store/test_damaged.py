"""A file of a run's folder that holds something else is one line that names it, whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from midflight import loading
from midflight.engines.http import Ledger, Usage
from midflight.errors import UserError
from midflight.evaluation import EvaluationResult
from midflight.evaluation.report import Closing, read_closing, read_report
from midflight.recipe import load_recipe
from midflight.recipe.own import keep_tasks, kept_tools
from midflight.recipe.resuming import check_run_folder, read_recipe
from midflight.store import RunFolder
from midflight.tasks.base import Task
from midflight.training.demonstrations import kept

Read = Callable[[RunFolder], Any]
SPENT = asdict(Usage(requests=1, prompt_tokens=7, money=0.5))
REMADE = "remove it: the report is then made again by --resume"


def spent(folder: RunFolder) -> Usage:
    ledger = Ledger()
    ledger.load(folder.usage)
    return ledger.total


@pytest.mark.parametrize(
    "content", ["", '{"req', "[]", "7", '{"tokens": 1}', "[" * 100_000, b"\xff",
                *(json.dumps({**SPENT, "requests": value}) for value in ("1", None, True, -1, float("nan")))],
)  # fmt: skip
def test_what_was_spent(content: str | bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.usage.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        spent(folder)
    assert str(caught.value).startswith(f"{folder.usage}: cannot be read (")
    assert str(caught.value).endswith("); repair it, or remove it: what was spent then counts from 0")
    folder.usage.write_text(json.dumps(SPENT))
    assert spent(folder) == Usage(**SPENT)
    folder.usage.unlink()
    assert spent(folder) == Usage()


@pytest.mark.parametrize(
    ("name", "read", "remedy"),
    [
        ("inputs/own-tools.json", kept_tools, "repair it: it lists the tools that the run's program gave"),
        ("report.json", read_closing, REMADE),
        ("report.txt", read_report, REMADE),
        (
            "eval_before.json",
            lambda folder: EvaluationResult.load(folder.eval_before),
            "remove it: it is then made again by --resume",
        ),
        (
            "adapter_config.json",
            lambda folder: loading.load_trained(load_recipe("quickstart"), str(folder.path), print),
            "repair it, or name another model",
        ),
    ],
)
@pytest.mark.parametrize(
    "content", [b"\xff", b'{"x"', b"7", b'"ab"', b"[" * 100_000], ids=["bytes", "half", "number", "text", "deep"]
)
def test_what_is_read_back(name: str, read: Read, remedy: str, content: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.inputs.mkdir()
    closing = Closing("r", 1, 1.0, 0.0, [], "?", [])
    folder.report_json.write_text(json.dumps({"closing": asdict(closing)}))
    (tmp_path / name).write_bytes(content)
    if name == "report.txt" and content != b"\xff":  # a text is a text
        return
    with pytest.raises(UserError) as caught:
        read(folder)
    assert str(caught.value).startswith(f"{tmp_path / name}: cannot be read (")
    assert str(caught.value).endswith(f"); {remedy}")


def test_the_recipe(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text("name: x\n")
    said = f"recipe {folder.recipe}: agent: missing; the recipe must set it"
    recipe = load_recipe("quickstart")
    for read in (
        lambda: read_recipe(folder.recipe),
        lambda: load_recipe(str(tmp_path)),
        lambda: load_recipe(str(tmp_path), ["seed=3"]),
        lambda: check_run_folder(tmp_path, recipe, resume=True),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value) == said
    with pytest.raises(UserError) as caught:  # in a file that is being written it is the key that counts
        load_recipe(str(folder.recipe))
    assert str(caught.value) == said.removeprefix(f"recipe {folder.recipe}: ")


def test_questions_of_a_program(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    tasks = [Task("1", "?", "x")]
    keep_tasks(folder, tasks, None, resume=False)
    keep_tasks(folder, tasks, None, resume=True)
    folder.own_tasks.write_bytes(b"\xff")
    with pytest.raises(UserError, match="^tasks: not those of the run in "):
        keep_tasks(folder, tasks, None, resume=True)


def test_demonstrations_that_are_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        kept(folder)
    assert str(caught.value) == (
        f"{folder.store}: holds no demonstrations; put back a copy of it, or start again with --from"
    )
    assert not folder.path.exists()
