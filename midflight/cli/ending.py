"""How a command ends that does not end well: one line and an exit code."""

from __future__ import annotations

import signal
import sys

from midflight import signals
from midflight.agent.prompting import cut_middle
from midflight.rendering import printable
from midflight.slips import without_keys

MOST_CHARACTERS = 1000
"""Of an error's line."""
SIGNALLED = 128
"""An exit code above it says by which signal, as shells have it."""


def fail(message: str, code: int) -> int:
    """Print one line, no key in it; of a very long one the middle is cut, since its end says what to do."""
    line = without_keys(" ".join(message.split()))
    print(f"midflight: {printable(cut_middle(line, MOST_CHARACTERS))}", file=sys.stderr)
    return code


def interrupted(and_then: str = "") -> tuple[str, int]:
    """Line and exit code."""
    by = signals.interrupted_by()
    name = "" if by is signal.SIGINT else f" by {by.name}"
    return f"interrupted{name}{and_then}", SIGNALLED + by
