"""Ends a program whose agent is gone, or did not end it in time. Imports nothing beside it: programs begin with it.

Invariant: no program outlives its agent by more than LOOK_SECONDS, however that ended; but a single call that keeps
Python's lock, as `sum(range(10**10))` without a sandbox, is not interrupted. WebAssembly lets go of the lock.
"""

from __future__ import annotations

import _thread
import os
import signal
import time

LOOK_SECONDS = 0.1


def end_with(agent: int, seconds: float) -> None:
    """Kill this process group when `agent` is no longer the parent of this process, or after `seconds`."""
    _thread.start_new_thread(_watch, (agent, time.monotonic() + seconds))


def _watch(agent: int, end: float) -> None:
    while os.getppid() == agent and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)
