"""The processes of a server, in whatever session it has put them: Linux shows what is in their environment.

Invariant: what is ended began with this server's mark in its environment, and is no other process that has got its id.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARK = "MIDFLIGHT_MCP_SERVER"
"""The variable that all processes of a server inherit."""
ROUNDS = 10


def end_marked(mark: str) -> None:
    """Kill every process whose `MARK` is `mark`, and those they start meanwhile. Without /proc, nothing."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(ROUNDS if Path("/proc/self/environ").exists() else 0):
        if not sum(_ended(int(name), wanted) for name in os.listdir("/proc") if name.isdecimal()):
            return


def _ended(process: int, wanted: bytes) -> bool:
    """Whether that one was to be killed."""
    try:
        handle = os.pidfd_open(process)
    except OSError:  # it is gone
        return False
    try:
        if wanted not in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:  # it is gone, or of another user
        return False
    finally:
        os.close(handle)
