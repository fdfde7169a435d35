"""One call inside a session: its process, its limits, what it wrote, and why it ended.

Invariant: a call ends at its limits of wall clock, processor time and memory, summed over all its processes, and of
output. What is kept in memory of what it writes is bounded by the limits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from . import frames, program

TICK = 0.05
"""Seconds between two looks at the memory and processor time that a call takes."""
SMALL_REPLY = 4 * 2**20
"""Bytes of a reply without a file."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


@dataclass
class Process:
    """A running call: its process and the ends of its pipes that are read here."""

    process: int
    out: int
    err: int
    reply: int
    ended: Callable[[bytearray], bool] = lambda reply: False
    """Whether the reply so far says that the call is over, of a process that goes on."""
    kept: bool = False
    largest_reply: int = SMALL_REPLY
    before: float = 0.0
    """Seconds of processor time that do not count: those of earlier calls."""
    requests: int = -1
    """Where the rest of its request is written, as far as it reads: whoever waited for it would watch no limit."""
    request: bytes = b""

    @classmethod
    def start(cls, request: dict[str, Any], confine: Callable[[], None]) -> Self:
        """Fork a process that confines itself and does what `request` says."""
        pipes = [os.pipe() for _ in range(3)]
        stdin = _sealed(frames.to_bytes(request.get("stdin", "")))
        ends = [stdin, *(write for _, write in pipes)]
        process = _fork(ends, confine, lambda reply: program.run(request, reply))
        os.close(stdin)
        for _, write in pipes:
            os.close(write)
        out, err, reply = (read for read, _ in pipes)
        largest = SMALL_REPLY + 2 * request.get("most", 0)
        return cls(process, out, err, reply, largest_reply=largest, before=_children_seconds())

    def tell(self) -> None:
        """Write of the request what there is room for; nothing waits."""
        try:
            self.request = self.request[os.write(self.requests, self.request) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.request = b""

    def close(self) -> None:
        if not self.kept:
            for descriptor in (self.out, self.err, self.reply):
                os.close(descriptor)


class Interpreter:
    """A process that keeps the variables of a trajectory between calls, and is stopped meanwhile."""

    def __init__(self, confine: Callable[[], None]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        requests, self._requests = os.pipe()
        os.set_blocking(self._requests, False)
        stdin = _sealed(b"")
        ends = [stdin, *(write for _, write in pipes), requests]
        self.process = _fork(ends, confine, lambda reply: program.keep(reply + 1, reply))
        for descriptor in (stdin, requests, *(write for _, write in pipes)):
            os.close(descriptor)
        self._pipes = [read for read, _ in pipes]

    def start(self, request: dict[str, Any]) -> Process:
        """Have it run the next code."""
        os.kill(self.process, signal.SIGCONT)
        before = _children_seconds() + seconds_of(self.process)
        out, err, reply = self._pipes
        call = Process(self.process, out, err, reply, ended=_complete, kept=True, before=before)
        call.requests, call.request = self._requests, frames.pack(request)
        return call

    def alive(self) -> bool:
        """Whether it is there still; once it is not, its pipes are closed."""
        try:
            gone = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            gone = True
        if gone:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.process, os.WNOHANG)
            for descriptor in (self._requests, *self._pipes):
                os.close(descriptor)
        return not gone


def _complete(reply: bytearray) -> bool:
    return len(reply) >= frames.HEAD and len(reply) >= frames.HEAD + int.from_bytes(reply[: frames.HEAD], "big")


def _is_answer(reply: bytearray) -> bool:
    """Whether a reply is what an interpreter that goes on says, and nothing else."""
    head, body = bytes(reply[: frames.HEAD]), bytes(reply[frames.HEAD :])
    try:
        return len(body) == frames.length(head) and isinstance(frames.unpack(body).get("code"), int)
    except (ValueError, RecursionError):
        return False


def _sealed(data: bytes) -> int:
    """A file that holds `data` and that nobody can change."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    _write_all(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)  # seal, shrink, grow, write
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Unconfined(Exception):
    """A process could not be confined, and so did nothing."""


def _fork(ends: list[int], confine: Callable[[], None], body: Callable[[int], int]) -> int:
    """Fork a process that keeps these descriptors alone, as 0, 1, 2 and so on, confines itself and runs `body`.

    Raises:
        Unconfined: it could not confine itself.
    """
    report, said = os.pipe()
    process = os.fork()
    if process:
        os.close(said)
        with open(report, "rb") as file:
            problem = file.read()  # ends when the child is confined: no program can write here
        if problem:
            os.waitpid(process, 0)
            raise Unconfined(problem.decode())
        return process
    code = 1
    try:
        os.setsid()
        moved = [os.dup2(end, 200 + index) for index, end in enumerate([*ends, said])]
        for index, end in enumerate(moved):
            os.dup2(end, index)
        said = len(ends)
        os.closerange(len(moved), 2**16)
        try:
            confine()
        except Exception as error:
            os.write(said, f"{type(error).__name__}: {error}".encode())
        else:
            os.close(said)
            code = body(3)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class _Read:
    """What came out of one pipe, at most `most` bytes of it."""

    most: int
    data: bytearray = field(default_factory=bytearray)
    over: bool = False

    def take(self, descriptor: int) -> bool:
        """Read once; False at the end of the pipe."""
        part = os.read(descriptor, 2**16)
        room = self.most - len(self.data)
        self.over = self.over or len(part) > room
        self.data += part[:room]
        return bool(part)


def watch(call: Process, limits: dict[str, Any], channel: socket.socket) -> dict[str, Any] | None:
    """Wait for the end of `call`, or make one; None when the agent hung up.

    The answer has `cause`: exit, wall, cpu, memory or output.
    """
    reads = {call.out: _Read(limits["output_bytes"]), call.err: _Read(limits["output_bytes"])}
    reads[call.reply] = _Read(call.largest_reply)
    poll = select.poll()
    pidfd = os.pidfd_open(call.process)
    for descriptor in (*reads, pidfd, channel.fileno()):
        poll.register(descriptor, select.POLLIN)
    if call.request:
        poll.register(call.requests, select.POLLOUT)
    began = time.monotonic()
    cause, status, looked = "", 0, began
    while not cause:
        now = time.monotonic()
        left = began + limits["wall_seconds"] - now
        if left <= 0:
            cause = "wall"
            break
        events = dict(poll.poll(min(left, TICK) * 1000))
        if channel.fileno() in events:
            return None
        if call.requests in events:
            call.tell()
            if not call.request:
                poll.unregister(call.requests)
        for descriptor in reads.keys() & events.keys():
            if not reads[descriptor].take(descriptor):
                poll.unregister(descriptor)
        if any(one.over for one in reads.values()):
            cause = "output"
        elif pidfd in events or call.ended(reads[call.reply].data):
            cause = "exit"
        elif now - looked >= TICK:
            looked, cause = now, _over(call, limits)
    os.close(pidfd)
    goes_on = cause == "exit" and call.kept and call.ended(reads[call.reply].data)
    if cause == "exit" and not goes_on:
        _, status = os.waitpid(call.process, 0)
    elif cause != "exit" and call.kept:
        os.kill(call.process, signal.SIGKILL)  # what it kept is lost with the call
        _, status = os.waitpid(call.process, 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    for descriptor, one in reads.items():
        _drain(descriptor, one)
    if cause == "exit" and any(one.over for one in reads.values()):
        cause = "output"
    if goes_on and (call.request or not _is_answer(reads[call.reply].data)):  # a program wrote there, and may go on
        os.kill(call.process, signal.SIGKILL)
        os.waitpid(call.process, 0)
    call.close()
    return {
        "cause": cause,
        "status": os.waitstatus_to_exitcode(status) if cause == "exit" else None,
        "out": frames.to_text(bytes(reads[call.out].data)),
        "err": frames.to_text(bytes(reads[call.err].data)),
        "reply": frames.to_text(bytes(reads[call.reply].data)),
        "seconds": time.monotonic() - began,
    }


def _drain(descriptor: int, read: _Read) -> None:
    """What a pipe still holds; its writers are stopped."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while not read.over and read.take(descriptor):
            pass
    os.set_blocking(descriptor, True)


def _over(call: Process, limits: dict[str, Any]) -> str:
    """`cpu` or `memory` when all processes together are over that limit, or nothing."""
    alive = processes()
    if _children_seconds() + sum(map(seconds_of, alive)) - call.before > limits["cpu_seconds"]:
        return "cpu"
    if sum(map(_resident, alive)) > limits["memory_bytes"] and sum(map(_share, alive)) > limits["memory_bytes"]:
        return "memory"
    return "memory" if _sockets() > limits["open_files"] else ""


def processes() -> list[int]:
    """All of the session but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _stat(process: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third on; none when it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def is_dead(process: int) -> bool:
    """Whether it is gone, or is only waited for."""
    return _stat(process)[:1] in ([], [b"Z"], [b"X"])


def is_stopped(process: int) -> bool:
    """Whether it is, and not on its way to its end: a signal that kills has it run again."""
    return _stat(process)[:1] == [b"T"]


def seconds_of(process: int) -> float:
    """Processor time of a process and of its ended children; 0 when it is gone."""
    return sum(map(int, _stat(process)[11:15])) / _TICKS_PER_SECOND


def _resident(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _share(process: int) -> int:
    """Resident bytes, those that several processes share divided among them: forks share what the zygote imported."""
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), 0)
    except OSError:
        return 0


def _sockets() -> int:
    """Sockets of the session: what waits in them is memory of the kernel that no process is charged for."""
    with open("/proc/self/net/unix", "rb") as file:
        return sum(1 for _ in file) - 1


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def address_space() -> int:
    """Bytes this process has mapped; a program begins with as many."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * _PAGE


def limit(limits: dict[str, Any], mapped: int) -> None:
    """Set the kernel's limits of one process; they are inherited and cannot be raised again."""
    count = limits["processes"] + 2  # the holder, and the interpreter that keeps state
    for which, most in (
        (resource.RLIMIT_AS, mapped + limits["memory_bytes"]),
        (resource.RLIMIT_NPROC, count),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 1),  # 1 also keeps a crash from being piped to the host's collector
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
