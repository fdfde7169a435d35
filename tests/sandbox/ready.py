"""Whether the sandbox's tests can run; where CI says that they must, a machine that cannot is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from midflight.sandbox import Limits, wasi
from midflight.sandbox.choose import bubblewrap_problem
from midflight.sandbox.wasi import WasiSandbox

NEEDED = "MIDFLIGHT_NEEDS_SANDBOX"


def need_bubblewrap() -> None:
    """Skip the test that calls this, with the reason, where bubblewrap does not work.

    Raises:
        AssertionError: it does not, and the environment says that it has to.
    """
    problem = bubblewrap_problem()
    assert not (problem and os.environ.get(NEEDED)), f"{NEEDED} is set, but {problem}"
    if problem:
        pytest.skip(problem)


def wasi_sandbox() -> Iterator[WasiSandbox]:
    """One for all tests of a module; skips or fails likewise."""
    lacking = wasi.missing()
    assert not (lacking and os.environ.get(NEEDED)), lacking
    if lacking:
        pytest.skip(lacking)
    made = WasiSandbox(Limits(wall_seconds=30, cpu_seconds=20))
    yield made
    made.close()
