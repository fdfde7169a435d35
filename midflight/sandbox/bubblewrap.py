"""The sandbox of bubblewrap: one outer box with a zygote in it, and in the box a box of its own for each session.

The outer box keeps programs from the host: other namespaces, no network, an empty environment, a file system of
read-only binds. The inner ones keep them from each other and from the zygote (`inside/holder.py`). A session serves one
trajectory and is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from midflight.errors import InfrastructureError
from midflight.sandbox import interpreter, seccomp
from midflight.sandbox.answers import lost, request_frame, result
from midflight.sandbox.base import Limits, Request, SandboxResult
from midflight.sandbox.inside import frames

PACKAGES = ("numpy", "sympy", "matplotlib", "pytest")
"""Distributions that programs find, where they are installed beside the agent."""
PRELOAD = ("numpy", "sympy")
"""What is imported before a program starts, so that its own import costs nothing."""
START_SECONDS = 60.0
GRACE_SECONDS = 5.0
"""How long the holder may be late before the session is killed from outside."""
_HERE = Path(__file__).resolve().parent
_SYSTEM = ("/etc/alternatives", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_USER = ("--uid", "1000", "--gid", "1000")


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
        lacking = missing()
        if lacking:
            raise InfrastructureError(f"no bubblewrap sandbox: {lacking}")
        python = interpreter.inside(box.packages)
        ours, theirs = socket.socketpair()
        log = os.memfd_create("zygote", 0)
        with theirs:
            process = subprocess.Popen(
                _command(python, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        zygote = cls(process, ours, log)
        settings = {
            "executable": f"{interpreter.BINARIES}/python",
            "preload": [name for name in box.preload if name in python.packages],
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
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            async with asyncio.timeout(START_SECONDS):
                with theirs:
                    socket.send_fds(self._control, [b"o"], [theirs.fileno()])
                await _readable(ours)
                _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
                if not descriptors:
                    raise ConnectionResetError("it ended")
                channel = Channel(*await asyncio.open_connection(sock=ours), descriptors[0])
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


class Channel:
    """The agent's end of one session."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pidfd: int) -> None:
        self._reader, self._writer, self._pidfd = reader, writer, pidfd
        self.turn = asyncio.Lock()
        """Held while a request runs."""
        self.lost = False

    async def begin(self) -> None:
        """Wait until the session is made.

        Raises:
            InfrastructureError: it cannot be made.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                problem = (await self._answer()).get("broken", "")
        except (asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            problem = type(error).__name__
        except BaseException:
            await self.close()
            raise
        if problem:
            await self.close()
            raise InfrastructureError(f"a bubblewrap session does not start: {problem}")

    async def _answer(self) -> dict[str, Any]:
        head = await self._reader.readexactly(frames.HEAD)
        return frames.unpack(await self._reader.readexactly(frames.length(head)))

    async def run(self, request: Request, limits: Limits) -> SandboxResult:
        """See `Session.run`; one request at a time."""
        if self.lost:
            return lost("the session of this trajectory ended; its files are gone")
        try:
            async with asyncio.timeout(limits.wall_seconds + GRACE_SECONDS):
                self._writer.write(frames.pack({**request_frame(request), "limits": asdict(limits)}))
                await self._writer.drain()
                answer = await self._answer()
        except (asyncio.IncompleteReadError, OSError, ValueError, TimeoutError) as error:
            await self.close()
            return lost(f"the session ended in this call ({type(error).__name__}); its files are gone")
        except BaseException:
            await self.close()
            raise
        if "broken" in answer:
            await self.close()
            raise InfrastructureError(f"the sandbox cannot confine a process: {answer['broken']}")
        return result(request, answer, limits)

    async def close(self) -> None:
        """Kill every process of the session and wait until they are gone."""
        if self.lost:
            return
        self.lost = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._writer.close()
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await _readable(self._pidfd)
        finally:
            os.close(self._pidfd)


async def _readable(source: int | socket.socket) -> None:
    """Wait until there is something to read; of a pidfd, until its process is gone."""
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(source, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(source)


def _command(python: interpreter.Inside, descriptor: int) -> list[str]:
    """The command that starts the outer box."""
    bwrap = shutil.which("bwrap")
    assert bwrap is not None, "missing() has looked"
    binds = [*python.binds, (str(_HERE / "inside"), "/opt/midflight/inside")]
    binds += [(place, place) for place in _SYSTEM if os.path.exists(place)]
    environment: dict[str, str] = {
        "PATH": f"{interpreter.BINARIES}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/workspace",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": interpreter.SITE,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": "/tmp/matplotlib",
    }
    if python.library_path:
        environment["LD_LIBRARY_PATH"] = python.library_path
    code = (
        "import sys; sys.path.insert(0, '/opt/midflight'); from inside import zygote; "
        f"sys.path[0] = '/workspace'; sys.path.append({interpreter.SITE!r}); zygote.main({descriptor})"
    )
    words = [bwrap, "--unshare-all", "--unshare-user", *_USER, "--hostname", "sandbox", "--die-with-parent"]
    words += ["--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr", "--tmpfs", "/opt", "--dir", "/opt/python", "--dir", "/etc"]
    words += [word for name in ("bin", "sbin", "lib", "lib32", "lib64") for word in _like_host(name)]
    words += ["BINDS"]
    words += ["--symlink", python.executable, f"{interpreter.BINARIES}/python"]
    words += ["--symlink", python.executable, f"{interpreter.BINARIES}/python3"]
    for folder in python.hidden:
        words += ["--tmpfs", folder, "--remount-ro", folder]
    words += ["--proc", "/proc", "--tmpfs", "/dev"]
    for name in _DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        words += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    for folder in ("/dev/shm", "/workspace", "/tmp", "/scratch"):
        words += ["--dir", folder]
    words += ["--remount-ro", "/dev", "--remount-ro", "/opt", "--remount-ro", "/", "--chdir", "/"]
    words += ["--", python.executable, "-I", "-S", "-B", "-c", code]
    if os.geteuid() == 0:
        given = {"binds": binds, "command": words}
        return [sys.executable, "-I", "-S", "-B", str(_HERE / "launch.py"), json.dumps(given)]
    at = words.index("BINDS")
    return [*words[:at], *(word for bind in binds for word in ("--ro-bind", *bind)), *words[at + 1 :]]


def _like_host(name: str) -> Sequence[str]:
    """/bin, /lib and so on: a link where the host has one into /usr, else a bind."""
    place = Path("/") / name
    if place.is_symlink():
        return ("--symlink", f"usr/{name}", f"/{name}")
    return ("--ro-bind", f"/{name}", f"/{name}") if place.is_dir() else ()
