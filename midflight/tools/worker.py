"""Blocking work that can be stopped: a module's function, run in a process of its own that is killed at the limit.

Invariant: a cancelled or timed-out call leaves no work behind, for its process is killed with those it started, but for
such as left its process group. A worker gets no environment variable but the few named here, so no key, and may take at
most `MEMORY` bytes. Nothing here holds up the event loop.

A worker starts at the first need, serves one call at a time and is kept for the next. Work that computes shares as many
turns as there are cores; work that may wait for others (the network, another process) has turns of its own by function,
and so keeps nothing else waiting. Turns go in the order of asking; waiting for one is not a call's time (see `clock`).
This is for our own functions on hostile data (a PDF, a page, a molecule) and for the user's own tools; code that a
model wrote belongs into the sandbox.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from midflight.errors import GivenUp
from midflight.tools.base import InfrastructureError, ToolError, TransientError
from midflight.tools.clock import waiting
from midflight.tools.threads import in_thread

P = ParamSpec("P")
T = TypeVar("T")

MEMORY = 4 * 2**30
"""Bytes of address space of a worker."""
LARGEST = 64 * 2**20
"""Bytes of an answer."""
AT_ONCE = max(2, os.cpu_count() or 1)
"""Calls that compute at a time."""
WAITING = max(8, AT_ONCE)
"""Calls of one function that may wait for others at a time, and idle workers that are kept."""
VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What a worker sees of the environment."""
_ERRORS = {error.__name__: error for error in (ToolError, TransientError, GivenUp, InfrastructureError)}

_DIED = "the worker process died; the input may need too much memory"


async def run_in_worker(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """`function(*arguments, **named)` in a worker, for a function that computes.

    Args:
        function: of a module that can be imported; its result is JSON.

    Raises:
        TransientError, GivenUp, InfrastructureError: raised by the function; the last also where no worker starts.
        ToolError: raised by it, or stands for another exception, or the worker died, such as of its memory limit.
        asyncio.CancelledError: the caller cancelled or timed out; the worker is killed.
    """
    return cast(T, await _in_turn("", AT_ONCE, _request(function, arguments, named)))


async def wait_in_worker(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """As `run_in_worker`, for a function that may wait for others."""
    return cast(T, await _in_turn(_name(function), WAITING, _request(function, arguments, named)))


async def run_tool_in_worker(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The text of what `function` gives as a tool; of its JSON `arguments` the worker makes the function's types."""
    return cast(str, await _in_turn(_name(function), WAITING, _request(function, (), arguments, as_tool=True)))


def run_in_worker_now(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """As `run_in_worker`, but the thread waits: for what a tool has to know when it is made."""
    return cast(T, _result(_Call(_request(function, arguments, named)).answer()))


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _request(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any], *, as_tool: bool = False
) -> bytes:
    return pickle.dumps((function.__module__, function.__qualname__, arguments, dict(named), as_tool))


async def _in_turn(kind: str, most: int, request: bytes) -> Any:
    """The result of a call, when it is its turn among the `most` of its kind."""
    kinds = _TURNS.setdefault(asyncio.get_running_loop(), {})
    turns = kinds.setdefault(kind, asyncio.Semaphore(most))
    with waiting() if turns.locked() else contextlib.nullcontext():
        await turns.acquire()
    try:
        call = _Call(request)
        try:
            answer = await in_thread(call.answer, "tool-worker")
        except BaseException:
            call.stop()
            raise
        return _result(answer)
    finally:
        turns.release()


def _result(answer: bytes | None) -> Any:
    if answer is None:
        raise ToolError("the worker process died; the input may need too much memory")
    outcome = json.loads(answer)
    if "result" in outcome:
        return outcome["result"]
    raise _ERRORS[outcome["error"]](outcome["message"], **outcome["said"])


class _Call:
    """One request and the worker that it is at."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._worker: _Worker | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def answer(self) -> bytes | None:
        """The answer; None when the worker died or was killed. The thread waits."""
        worker, answer = _POOL.take(), None
        with self._lock:
            self._worker, stopped = worker, self._stopped
        try:
            if not stopped:
                answer = worker.ask(self._request)
        finally:
            with self._lock:
                self._worker, stopped = None, self._stopped
            if answer is None or stopped:
                worker.end()
            else:
                _POOL.give_back(worker)
        return answer

    def stop(self) -> None:
        """Kill the worker without waiting for its end: `answer` does, in its thread."""
        with self._lock:
            self._stopped = True
            if self._worker is not None:
                self._worker.kill()


class _Worker:
    """One process, one request at a time."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from midflight.tools.worker import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"no worker process can be started: {error}") from error

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes | None:
        """The answer; None when the process has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, request)
            return _receive(self._process.stdout)
        except OSError:  # a broken pipe
            return None

    def kill(self) -> None:
        """Kill the process and those that it started; this does not wait for their end."""
        if self._process.returncode is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter is macOS's word for a dead one
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and wait until the system has taken back what it held."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a request that it did not read
                    pipe.close()


class _Pool:
    """Idle workers of this process; all end with it, at the latest when their pipe closes."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._idle.clear)

    def take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.end()
        return _Worker()

    def give_back(self, worker: _Worker) -> None:
        with self._lock:
            if len(self._idle) < WAITING:
                self._idle.append(worker)
                return
        worker.end()

    def close(self) -> None:
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
        for worker in idle:
            worker.kill()
        for worker in idle:
            worker.end()


_POOL = _Pool()
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()
"""By event loop, since a semaphore belongs to one; of what computes under no name."""


def serve() -> None:
    """A worker's life: requests from standard input until it closes."""
    import resource

    from midflight.tools.function import FunctionTool
    from midflight.tools.own import load_module
    from midflight.tools.text import result_text

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    while (request := _receive(requests)) is not None:
        module, name, arguments, named, as_tool = pickle.loads(request)
        try:
            function = getattr(load_module(module), name)
            if as_tool:
                made = function if isinstance(function, FunctionTool) else FunctionTool(function)
                result = result_text(made.function(**made.values(named)))
            else:
                result = function(*arguments, **named)
            answer = json.dumps({"result": result}).encode()
            if len(answer) > LARGEST:
                raise ToolError(f"the result is larger than {LARGEST >> 20} MB")
        except BaseException as error:  # the boundary: the caller gets every failure as a typed one
            answer = json.dumps(_told(error)).encode()
        _send(answers, answer)
    os.killpg(0, signal.SIGKILL)  # itself, and what it started


def _told(error: BaseException) -> dict[str, Any]:
    """An error as one of `_ERRORS`, with what else that one says."""
    kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
    said: dict[str, Any] = {}
    if isinstance(error, TransientError):
        said = {"retry_after": error.retry_after, "infrastructure": error.infrastructure, "so_far": error.so_far}
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    return {"error": kind or "ToolError", "message": message, "said": said}


def _end_with(parent: int) -> None:
    """End this process, and what it started, with the one that started it, however that ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _send(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(struct.pack("<Q", len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> bytes | None:
    """The next message; None where the pipe ends."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    data = pipe.read(length)
    return data if len(data) == length else None
