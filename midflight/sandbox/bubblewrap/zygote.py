"""The outer box from outside: starts bubblewrap with the zygote in it, and asks it for sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Self

from midflight.errors import InfrastructureError
from midflight.sandbox.bubblewrap import interpreter, seccomp
from midflight.sandbox.bubblewrap.channel import START_SECONDS, Channel, readable
from midflight.sandbox.bubblewrap.command import command
from midflight.sandbox.bubblewrap.inside import frames
from midflight.sandbox.options import PACKAGES

PRELOAD = ("numpy", "numpy.random", "sympy")
"""What is imported before a program starts, so that its own import costs nothing."""

OLDEST_LINUX = (5, 14)
"""From here on a limit of processes counts those of one session, not all that its user has."""


@dataclass(frozen=True)
class Box:
    """What is the same for all sessions."""

    packages: tuple[str, ...] = PACKAGES
    preload: tuple[str, ...] = PRELOAD
    disk_bytes: int = 64 * 2**20
    """Of all files of a session, which are memory."""
    disk_files: int = 4096
    """Files and folders of a session."""


def missing() -> str:
    """What to install for bubblewrap, on one line; empty when all is there."""
    if not sys.platform.startswith("linux"):
        return "bubblewrap needs Linux"
    lacking = []
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < OLDEST_LINUX:
        lacking.append("Linux {}.{} or newer".format(*OLDEST_LINUX))
    if shutil.which("bwrap") is None:
        lacking.append("apt-get install bubblewrap")
    try:
        seccomp.instructions()
    except ImportError:
        lacking.append("pip install pyseccomp")
    except RuntimeError:
        lacking.append("apt-get install libseccomp2")
    return "; ".join(lacking)


class Zygote:
    """The outer box. Use it from one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, log: int) -> None:
        self._process, self._control, self._log = process, control, log

    @classmethod
    async def start(cls, box: Box) -> Self:
        """Start it and wait until it has imported what programs want.

        Raises:
            InfrastructureError: it does not start; the message says what bubblewrap said.
        """
        with contextlib.ExitStack() as made:
            try:
                lacking = missing()
                if lacking:
                    raise InfrastructureError(f"no bubblewrap sandbox: {lacking}")
                python = interpreter.inside(box.packages)
                ours, theirs = socket.socketpair()
                made.callback(ours.close)
                with theirs:
                    log = os.memfd_create("zygote", 0)
                    made.callback(os.close, log)
                    process = subprocess.Popen(
                        command(python, theirs.fileno()),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        env={},
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
            except OSError as error:
                raise InfrastructureError(f"the bubblewrap sandbox does not start: {error}") from error
            made.pop_all()
        zygote = cls(process, ours, log)
        settings = {
            "executable": f"{interpreter.BINARIES}/python",
            "preload": [name for name in box.preload if name.partition(".")[0] in python.packages],
            "filter": frames.to_text(seccomp.instructions()),
            "disk_bytes": box.disk_bytes,
            "disk_files": box.disk_files,
        }
        ours.setblocking(False)
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.get_running_loop().sock_sendall(ours, frames.pack(settings))
                ready = await asyncio.get_running_loop().sock_recv(ours, 1)
        except (TimeoutError, OSError) as error:
            ready = b""
            reason = type(error).__name__
        except BaseException:
            await zygote.close()
            raise
        else:
            reason = "it ended"
        if not ready:
            said = os.pread(log, 10_000, 0).decode("utf-8", "replace").strip().splitlines()
            await zygote.close()
            raise InfrastructureError(f"the bubblewrap sandbox does not start: {said[-1] if said else reason}")
        return zygote

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def open(self) -> Channel:
        """A new session.

        Raises:
            InfrastructureError: the zygote, or the session's start, failed.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise InfrastructureError(f"a bubblewrap session does not start: {error}") from error
        ours.setblocking(False)
        try:
            async with asyncio.timeout(START_SECONDS):
                with theirs:
                    socket.send_fds(self._control, [b"o"], [theirs.fileno()])
                await readable(ours)
                _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
                if not descriptors:
                    raise ConnectionResetError("it ended")
                channel = Channel(*await asyncio.open_connection(sock=ours), descriptors[0], lambda: self.alive)
        except (OSError, TimeoutError) as error:
            ours.close()
            raise InfrastructureError(
                f"a bubblewrap session does not start: {error or type(error).__name__}"
            ) from error
        except BaseException:
            ours.close()
            raise
        await channel.begin()
        return channel

    async def close(self) -> None:
        """End the outer box and all in it."""
        self._control.close()
        self._process.kill()
        while self._process.poll() is None:
            await asyncio.sleep(0.002)
        os.close(self._log)
