from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.cli.lines import Stub


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


@pytest.fixture
def no_work(stub: Stub) -> None:
    """Any attempt to load a model or to train fails the test."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work has started")

    stub("midflight.training.trainer", train=never)
    stub("midflight.training.sft", sft=never)
    stub("midflight.building", build_agent=never)
    stub("midflight.evaluation.held_out", evaluate_model=never, listed_tasks=lambda source: [])
    stub("midflight.progress", Progress=object)
