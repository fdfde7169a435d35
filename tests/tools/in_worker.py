"""Functions that tests run in a worker process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from midflight.errors import GivenUp
from midflight.tools import InfrastructureError, ToolError, TransientError, tool


def process_id() -> int:
    return os.getpid()


def environment() -> dict[str, str]:
    return dict(os.environ)


def late(file: str, seconds: float) -> str:
    Path(file + ".started").write_text("")
    time.sleep(seconds)
    Path(file).write_text("still there")
    return "done"


class NotFound(ToolError):
    pass


def fails(kind: str) -> None:
    print("noise on standard output", flush=True)
    if kind == "busy":
        raise TransientError("why", retry_after=1.5, infrastructure=False, so_far="what")
    errors = {"tool": ToolError, "own": NotFound, "service": InfrastructureError, "ended": GivenUp, "value": ValueError}
    raise errors[kind]("why")


def eats_memory() -> int:
    return len(bytearray(8 * 2**30))


def dies() -> None:
    os._exit(3)


def not_json() -> object:
    return {1, 2}


@tool(process=True)
def slow_double(number: float, seconds: float = 0.0) -> float:
    """Twice the number, after a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # busy, as a hostile input would make it
        pass
    return 2 * number
