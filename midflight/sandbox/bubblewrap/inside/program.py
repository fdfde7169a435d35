"""What a confined process does: run Python, tests or a command, or touch a file of the workspace.

Everything here is already behind the walls.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
import traceback
from typing import Any

from . import files, frames, running, testing


def run(request: dict[str, Any], reply: int) -> int:
    """Do what a request says; the exit code."""
    match request["kind"]:
        case "python":
            _streams()
            _fresh()
            namespace = running.main_module()
            code, problem = running.run_code(request["code"], namespace, request["figures"])
            _finish()
            _say(reply, problem)
            return code
        case "tests":
            _streams()
            _fresh()
            code, told = testing.run(request["paths"])
            _finish()
            _say(reply, told)
            return code
        case "command":
            os.closerange(3, 2**16)
            return _execute(request["command"])
        case _:
            _say(reply, files.answer(request, running.WORKSPACE))
            return 0


def keep(requests: int, reply: int) -> int:
    """Run one code after the other in one namespace; after each, a frame goes to `reply`."""
    _streams()
    _fresh()
    namespace = running.main_module()
    with open(requests, "rb", closefd=False) as source:
        while head := source.read(frames.HEAD):
            request = frames.unpack(source.read(frames.length(head)))
            sys.stdin = io.TextIOWrapper(io.BytesIO(frames.to_bytes(request["stdin"])), "utf-8", "surrogatepass")
            code, problem = running.run_code(request["code"], namespace, request["figures"])
            _flush()
            _say(reply, {**problem, "code": code})
    return 0


def _streams() -> None:
    """Text streams that take any character, and show at once what was written."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)
    sys.stdout = open(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def _fresh() -> None:
    """Chance that differs from program to program, although all are forks of one process; `random` sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _finish() -> None:
    """What the interpreter does at its end, but for taking itself apart."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass


def _say(reply: int, message: dict[str, Any]) -> None:
    data = memoryview(frames.pack(message))
    while data:
        data = data[os.write(reply, data) :]


def _execute(command: list[str]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which a command would inherit
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:  # ValueError: a word that no command can be given
        print(f"{command[0]}: {error.strerror if isinstance(error, OSError) else error}", file=sys.stderr, flush=True)
        return 127
