"""Blocking work that can be stopped: a module's function, run in a process of its own that is killed at the limit.

Invariant: a cancelled or timed-out `run_in_worker` leaves no work behind, for its process is killed. A worker gets no
environment variable but the few named here, so no key, and may take at most `MEMORY` bytes.

A worker starts at the first need, serves one call at a time and is kept for the next; of many calls at once as many run
as there are cores, in the order of asking, and waiting counts as a call's time. This is for our own functions on
hostile data (a PDF, a page, a molecule); code that a model wrote belongs into the sandbox.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from midflight.errors import GivenUp
from midflight.tools.base import InfrastructureError, ToolError, TransientError

P = ParamSpec("P")
T = TypeVar("T")

MEMORY = 4 * 2**30
"""Bytes of address space of a worker."""
LARGEST = 64 * 2**20
"""Bytes of an answer."""
AT_ONCE = max(2, os.cpu_count() or 1)
"""Calls that run at a time, and idle workers that are kept."""
VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What a worker sees of the environment."""
_ERRORS = {error.__name__: error for error in (ToolError, TransientError, GivenUp, InfrastructureError)}

_DIED = "the worker process died; the input may need too much memory"


async def run_in_worker(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """`function(*arguments, **named)` in a worker.

    Args:
        function: of a module that can be imported; its result is JSON.

    Raises:
        TransientError, GivenUp, InfrastructureError: raised by the function.
        ToolError: raised by it, or stands for another exception, or the worker died, such as of its memory limit.
        asyncio.CancelledError: the caller cancelled or timed out; the worker is killed.
    """
    request = _request(function, arguments, named)
    loop = asyncio.get_running_loop()
    async with _SLOTS.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
        answer = await _asked(request, loop)
    return cast(T, _result(answer))


def run_in_worker_now(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """As `run_in_worker`, but the thread waits: for what a tool has to know when it is made."""
    worker = _POOL.take()
    try:
        answer = worker.ask(_request(function, arguments, named))
        if answer is None:
            raise ToolError(_DIED)
    except BaseException:
        worker.kill()
        raise
    _POOL.give_back(worker)
    return cast(T, _result(answer))


def _request(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    return pickle.dumps((function.__module__, function.__qualname__, arguments, named))


def _result(answer: bytes) -> Any:
    outcome = json.loads(answer)
    if "result" in outcome:
        return outcome["result"]
    raise _ERRORS[outcome["error"]](outcome["message"], **outcome["said"])


async def _asked(request: bytes, loop: asyncio.AbstractEventLoop) -> bytes:
    """The answer of a worker, which is killed when this is cancelled."""
    worker = _POOL.take()
    answered: asyncio.Future[bytes] = loop.create_future()

    def settle(answer: bytes | None) -> None:
        if not answered.done():
            if answer is None:
                answered.set_exception(ToolError(_DIED))
            else:
                answered.set_result(answer)

    def work() -> None:
        answer = worker.ask(request)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=work, name="tool-worker", daemon=True).start()
    try:
        answer = await answered
    except BaseException:
        worker.kill()
        raise
    _POOL.give_back(worker)
    return answer


class _Worker:
    """One process, one request at a time."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from midflight.tools.worker import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes | None:
        """The answer; None when the process has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _send(self._process.stdin, request)
            return _receive(self._process.stdout)
        except (OSError, ValueError):  # a broken pipe, or one that `kill` has closed
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


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
        return _Worker()

    def give_back(self, worker: _Worker) -> None:
        with self._lock:
            if len(self._idle) < AT_ONCE:
                self._idle.append(worker)
                return
        worker.kill()

    def close(self) -> None:
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
        for worker in idle:
            worker.kill()


_POOL = _Pool()
_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""By event loop, since a semaphore belongs to one."""


def serve() -> None:
    """A worker's life: requests from standard input until it closes."""
    import resource

    from midflight.tools.function import FunctionTool
    from midflight.tools.own import load_module

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    while (request := _receive(requests)) is not None:
        module, name, arguments, named = pickle.loads(request)
        try:
            found = getattr(load_module(module), name)
            function = found.function if isinstance(found, FunctionTool) else found
            answer = json.dumps({"result": function(*arguments, **named)}).encode()
            if len(answer) > LARGEST:
                raise ToolError(f"the result is larger than {LARGEST >> 20} MB")
        except BaseException as error:  # the boundary: the caller gets every failure as a typed one
            answer = json.dumps(_told(error)).encode()
        _send(answers, answer)


def _told(error: BaseException) -> dict[str, Any]:
    """An error as one of `_ERRORS`, with what else that one says."""
    kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "")
    said: dict[str, Any] = {}
    if isinstance(error, TransientError):
        said = {"retry_after": error.retry_after, "infrastructure": error.infrastructure, "so_far": error.so_far}
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    return {"error": kind or "ToolError", "message": message, "said": said}


def _end_with(parent: int) -> None:
    """End this process with the one that started it, however that ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


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
