"""What ends a run from below it is one line, and its session is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.errors import TrainingStopped
from midflight.store import RunFolder
from midflight.training.session import conduct


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
