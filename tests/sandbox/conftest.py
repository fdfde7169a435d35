"""One sandbox for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from midflight.sandbox import Limits
from midflight.sandbox.bubblewrap import BubblewrapSandbox
from tests.sandbox.ready import need_bubblewrap


@pytest.fixture(scope="module")
def sandbox() -> Iterator[BubblewrapSandbox]:
    need_bubblewrap()
    with BubblewrapSandbox(Limits(wall_seconds=20)) as made:
        yield made
