"""The zygote: imports what programs want, once, and forks a session from itself for each request.

Invariant: it never runs a line that a program or the agent's model wrote, and keeps nothing of a session. Each session
is in its own user, mount, process, network and IPC namespaces, from which the zygote cannot be seen (`holder`).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import site
import socket
import sys
from typing import Any

from . import frames, holder, linux


def main(descriptor: int) -> None:
    """Serve the agent behind socket `descriptor` until it hangs up."""
    control = socket.socket(fileno=descriptor)
    settings = frames.receive(control)
    assert settings is not None, "the agent hung up before it said what to import"
    sys.argv = [""]
    sys.executable = settings["executable"]
    site.setquit()
    site.sethelper()
    for name in settings["preload"]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children are not waited for
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # a child that collects garbage then does not copy these pages
    control.sendall(b"!")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as channel:
            _fork_session(channel, settings)


def _fork_session(channel: socket.socket, settings: dict[str, Any]) -> None:
    """Fork the holder; the agent gets a pidfd of it, to kill the session by, before the holder says anything."""
    told, telling = os.pipe()
    try:
        child = linux.fork_into(holder.NAMESPACES)
        if child == 0:
            os.close(telling)
            holder.start(channel, told, settings)
        pidfd = os.pidfd_open(child)
        socket.send_fds(channel, [b"!"], [pidfd])
        os.close(pidfd)
    except OSError as error:
        print(f"a session: {error}", file=sys.stderr, flush=True)  # the agent sees its channel end
    finally:
        os.close(told)
        os.close(telling)
