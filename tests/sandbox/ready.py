"""Whether the sandbox's tests can run; where CI says that they must, a machine that cannot is a failure."""

from __future__ import annotations

import os

import pytest

from midflight.sandbox.choose import bubblewrap_problem

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
