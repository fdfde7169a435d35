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

from . import frames, holder


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
        if os.fork() == 0:
            control.close()
            holder.start(socket.socket(fileno=descriptors[0]), settings)
        os.close(descriptors[0])
