"""What the tests of the command line have in common."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

Stub = Callable[..., types.ModuleType]


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing may be on stdout."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.endswith("\n")
    return printed.err.rstrip("\n")
