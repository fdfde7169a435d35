"""What holds for all tests."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes its own folder for temporary files: a test looks at what is left in /tmp."""
    if hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="tests-")
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: one that begins last is waited for by the other processes."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
