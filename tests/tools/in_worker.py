"""Functions that tests run in a worker process."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from midflight.errors import GivenUp
from midflight.tools import InfrastructureError, ToolError, TransientError, tool
from midflight.tools.worker import run_in_worker


def process_id() -> int:
    return os.getpid()


def environment() -> dict[str, str]:
    return dict(os.environ)


def late(file: str, seconds: float) -> str:
    Path(file + ".started").write_text("")
    time.sleep(seconds)
    Path(file).write_text("still there")
    return "done"


def holds(folder: str) -> int:
    """Until there is a file `go` in the folder."""
    Path(folder, f"held-{os.getpid()}").write_text("")
    while not Path(folder, "go").exists():
        time.sleep(0.005)
    return os.getpid()


def starts(file: str) -> None:
    """A process that does not end, its number in the file, and waits for it."""
    child = subprocess.Popen(["sleep", "600"])
    Path(f"{file}.part").write_text(str(child.pid))
    os.rename(f"{file}.part", file)
    child.wait()


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


@tool(process=True)
def held(folder: str) -> int:
    """Holds a worker."""
    return holds(folder)


@tool
async def identified() -> int:
    """Number of a process that computes."""
    return await run_in_worker(process_id)
