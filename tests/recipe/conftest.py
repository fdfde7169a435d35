from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe.test_config import MINIMAL


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A minimal recipe's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(MINIMAL)
    return file
