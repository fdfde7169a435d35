"""What ends a run from below it is one line, and its session is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.errors import TrainingStopped, UserError
from midflight.store import RunFolder
from midflight.training.conduct import conduct


class Failing:
    """A session whose run raises."""

    closed = False

    def __init__(self, folder: Path, error: Exception) -> None:
        self.folder, self.error = RunFolder(folder), error

    def run(self, **_: object) -> Any:
        raise self.error

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "out of memory: CUDA out of memory. Tried; make room "),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "out of memory: DefaultCPUAllocator: not "),
        (MemoryError(), "out of memory: the interpreter's own; make room and go on with --resume"),
    ],
)
def test_memory_that_runs_out_outside_of_packs_is_one_line(tmp_path: Path, error: Exception, line: str) -> None:
    session: Any = Failing(tmp_path / "run", error)
    with pytest.raises(TrainingStopped) as stopped:
        conduct(session, resume=False, evaluate_ends=False)
    assert str(stopped.value).startswith(line) and "\n" not in str(stopped.value) and session.closed


def test_a_fault_of_the_program_stays_what_it_is(tmp_path: Path) -> None:
    session: Any = Failing(tmp_path / "run", RuntimeError("shape '[2]' is invalid"))
    with pytest.raises(RuntimeError, match="shape"):
        conduct(session, resume=False, evaluate_ends=False)
    assert session.closed


def test_a_run_made_while_the_model_was_loaded_is_left_alone(tmp_path: Path) -> None:
    session: Any = Failing(tmp_path / "run", RuntimeError("not to be run"))
    session.folder.create().recipe.write_text("name: other\n")
    kept: list[str] = []
    with pytest.raises(UserError, match="exists and is not empty; to go on: midflight train "):
        conduct(session, resume=False, evaluate_ends=False, keep=lambda: kept.append("questions"))
    assert not kept and session.closed
    assert sorted(one.name for one in session.folder.path.iterdir()) == ["checkpoints", "plots", "recipe.yaml"]


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_new_run_keeps_is_kept_under_the_lock(tmp_path: Path, resume: bool) -> None:
    session: Any = Failing(tmp_path / "run", RuntimeError("run"))
    seen: list[bool] = []

    def keep() -> None:
        with pytest.raises(UserError, match="another process is training there"), session.folder.locked():
            pass
        seen.append(session.folder.beginning.is_file())

    with pytest.raises(RuntimeError, match="run"):
        conduct(session, resume=resume, evaluate_ends=False, keep=keep)
    assert seen == ([] if resume else [True])
