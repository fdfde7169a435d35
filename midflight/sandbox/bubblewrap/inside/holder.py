"""The holder of a session: process 1 of the session's own namespaces, which runs one call after the other.

Invariant: it runs no line of a program. When a call is answered, each process that the call started is dead, but for
the interpreter that keeps a trajectory's state, which is stopped. When the agent hangs up the holder ends, and with
process 1 the kernel ends everything in the session; its files are memory that goes with the mount namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from typing import Any, NoReturn

from . import calls, frames, linux

NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
"""What a session has for itself."""
USER = 1000
"""The user's and group's number in the outer box and in a session."""
WRITABLE = ("/workspace", "/tmp", "/dev/shm")
"""Parts of one memory file system, the only one that can be written."""
_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_SCRATCH = "/scratch"


def start(channel: socket.socket, told: int, settings: dict[str, Any]) -> NoReturn:
    """Furnish the namespaces this process begins in, serve the agent, end. Whatever fails ends the session.

    `told` ends when the agent can kill this process.
    """
    try:
        os.read(told, 1)
        os.closerange(3, channel.fileno())
        os.closerange(channel.fileno() + 1, 2**16)
        try:
            _enter()
            _furnish(settings)
        except Exception as error:
            channel.sendall(frames.pack({"broken": f"{type(error).__name__}: {error}"}))
        else:
            channel.sendall(frames.pack({}))
            serve(channel, settings)
    finally:
        os._exit(0)


def _enter() -> None:
    """Become the one user of the new user namespace, which makes no other."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{USER} {USER} 1")
    _write("/proc/self/gid_map", f"{USER} {USER} 1")
    _write("/proc/sys/user/max_user_namespaces", "0")
    _write("/proc/self/oom_score_adj", "1000")  # where memory runs out, the kernel kills here and not the agent
    linux.set_dumpable(False)  # programs have the same user: they must not read or write this memory


def _furnish(settings: dict[str, Any]) -> None:
    """Private writable folders and /proc; then see that nothing else can be written."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    quiet = linux.MS_NOSUID | linux.MS_NODEV
    size = f"mode=0755,size={settings['disk_bytes']},nr_inodes={settings['disk_files']}"
    linux.mount("scratch", _SCRATCH, "tmpfs", quiet, size)
    for target in WRITABLE:
        part = _SCRATCH + "/" + os.path.basename(target)
        os.mkdir(part, 0o755)
        linux.mount(part, target, None, linux.MS_BIND)
    linux.mount("none", _SCRATCH, "tmpfs", quiet | linux.MS_RDONLY, "size=4k")  # one way to each file
    linux.mount("proc", "/proc", "proc", quiet | linux.MS_NOEXEC | linux.MS_RDONLY, "hidepid=2,subset=pid")
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        open_ones = writable_mounts(file.read())
    if open_ones:
        raise PermissionError(f"can be written: {open_ones}")
    os.chdir(WRITABLE[0])


def writable_mounts(mountinfo: str) -> list[str]:
    """The mount points that are not read-only and are none of those a session may write."""
    last = {}  # what is mounted last on a place is what one sees there
    for line in mountinfo.splitlines():
        fields = line.split()
        last[fields[4]] = fields[5].split(",")
    return [place for place, options in last.items() if "rw" in options and place not in {*WRITABLE, *_DEVICES}]


def serve(channel: socket.socket, settings: dict[str, Any]) -> None:
    """Answer requests until the agent hangs up."""
    instructions = frames.to_bytes(settings["filter"])
    memory = calls.address_space()
    state: calls.Interpreter | None = None
    while (request := frames.receive(channel)) is not None:
        confine = functools.partial(_confine, request["limits"], memory, instructions)
        try:
            if request["kind"] != "state":
                call = calls.Process.start(request, confine)
            else:
                state = state or calls.Interpreter(confine)
                call = state.start(request)
        except calls.Unconfined as error:
            channel.sendall(frames.pack({"broken": str(error)}))
            return
        answer = calls.watch(call, request["limits"], channel)
        if answer is None:
            return
        end_others(None if state is None else state.process)
        if state is not None and not state.alive():
            state = None
        answer["state_kept"] = state is not None
        channel.sendall(frames.pack(answer))


def end_others(kept: int | None) -> None:
    """Kill every process of the session but this and `kept`, which stays as it is, stopped."""
    if kept is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)  # a stopped process starts no other while the list is read
        for process in calls.processes():
            if process != kept:
                os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # there is no other child, so no other process
        while kept is None:
            os.waitpid(-1, 0)
    while any(process != kept and not calls.is_dead(process) for process in calls.processes()):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.0005)
    while kept is not None and not calls.is_stopped(kept) and not calls.is_dead(kept):  # another may have killed it
        time.sleep(0.0005)


def _confine(limits: dict[str, Any], memory: int, instructions: bytes) -> None:
    """What a child does before it runs a line of a program. There is no way back from any of it."""
    calls.limit(limits, memory)
    linux.drop_capabilities()
    linux.set_dumpable(True)  # its own /proc/self; it has nothing to hide
    linux.confine(instructions)


def _write(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
