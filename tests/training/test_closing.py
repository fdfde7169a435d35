"""What a training session has made is closed where a later step fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midflight.building import Named
from midflight.engines.http import Ledger
from midflight.errors import UserError
from midflight.progress import Progress
from midflight.recipe import load_recipe
from midflight.tasks.base import Task
from midflight.training import session
from midflight.training.trainer import Trainer


class Held:
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("failing", ["engines_of", "load_trained"])
def test_tools_and_engines_are_closed(failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolset, server = Held(), Held()

    def engines_of(*given: Any) -> Named:
        if failing == "engines_of":
            raise UserError("no")
        return Named({}, (server,), Ledger())

    def load_trained(*given: Any) -> Any:
        raise UserError("no")

    monkeypatch.setattr(session, "toolset_of", lambda *given: toolset)
    monkeypatch.setattr(session, "engines_of", engines_of)
    monkeypatch.setattr(session, "load_trained", load_trained)
    with pytest.raises(UserError, match="no"):
        Trainer(load_recipe("quickstart"), tmp_path, Progress(), None, [Task("q", "?", "a")], [])
    assert (toolset.closed, server.closed) == (1, int(failing == "load_trained"))
