"""Processes of this machine, to see what a sandbox leaves."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def host_processes(marker: str) -> list[int]:
    """Processes of this machine whose command line holds `marker`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "cmdline").read_bytes() and folder.name != str(os.getpid()):
                found.append(int(folder.name))
    return found


def wait_until_gone(marker: str, seconds: float = 5.0) -> list[int]:
    end = time.monotonic() + seconds
    while (left := host_processes(marker)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def children(process: int) -> list[str]:
    listed = Path(f"/proc/{process}/task").glob("*/children")
    found = [word for file in listed for word in file.read_text().split()]
    return found + [word for one in found for word in children(int(one))]
