"""What a confined process does: run Python, tests or a command, or touch a file of the workspace.

Everything here is already behind the walls. A file is opened folder by folder from /workspace, and no symbolic link is
followed, so no path leaves it, whatever the session's processes change meanwhile.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import builtins
import io
import linecache
import os
import signal
import stat
import sys
import threading
import traceback
import types
from typing import Any

from . import frames, testing

NAME = "<program>"
WORKSPACE = "/workspace"
_MOST_LISTED = 2000
_FEATURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names) & ~0x10
"""Flags of `from __future__ import ...`; 0x10 is the one of `nested_scopes`, which also means something else."""


def run(request: dict[str, Any], reply: int) -> int:
    """Do what a request says; the exit code."""
    match request["kind"]:
        case "python":
            _streams()
            _fresh()
            namespace = _main_module()
            code, problem = run_code(request["code"], namespace, request["figures"])
            _finish()
            _say(reply, problem)
            return code
        case "tests":
            _streams()
            _fresh()
            code, tests = testing.run(request["paths"])
            _finish()
            _say(reply, {"tests": tests})
            return code
        case "command":
            os.closerange(3, 2**16)
            return _execute(request["command"])
        case _:
            try:
                answer = _FILES[request["kind"]](request)
            except (OSError, UnicodeError, ValueError) as error:
                answer = {"problem": str(error.strerror if isinstance(error, OSError) else error), **_described(error)}
            _say(reply, answer)
            return 0


def keep(requests: int, reply: int) -> int:
    """Run one code after the other in one namespace; after each, a frame goes to `reply`."""
    _streams()
    _fresh()
    namespace = _main_module()
    with open(requests, "rb", closefd=False) as source:
        while head := source.read(frames.HEAD):
            request = frames.unpack(source.read(frames.length(head)))
            sys.stdin = io.TextIOWrapper(io.BytesIO(frames.to_bytes(request["stdin"])), "utf-8")
            code, problem = run_code(request["code"], namespace, request["figures"])
            _flush()
            _say(reply, {**problem, "code": code})
    return 0


def run_code(source: str, namespace: dict[str, Any], figures: bool) -> tuple[int, dict[str, Any]]:
    """Run a program once; the value of a last expression is printed as the interactive interpreter prints it."""
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    running = False
    try:
        tree = ast.parse(source, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        body = compile(tree, NAME, "exec", dont_inherit=True)
        shown = None
        if last is not None:
            flags = body.co_flags & _FEATURES
            shown = compile(ast.Interactive([last]), NAME, "single", flags, dont_inherit=True)
        running = True
        exec(body, namespace)
        if shown is not None:
            exec(shown, namespace)
        return 0, {"files": save_figures() if figures else []}
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF, {}
        print(error.code, file=sys.stderr)
        return 1, {}
    except BaseException as error:
        problem = _described(error)
        trace = error.__traceback__.tb_next if running and error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace)
        return 1, problem


def save_figures() -> list[dict[str, Any]]:
    """Save each open figure of pyplot as figure-N.png, with the next free N, and close it; a row for each."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    saved: list[dict[str, Any]] = []
    index = 1
    for number in pyplot.get_fignums():
        while os.path.lexists(place := f"{WORKSPACE}/figure-{index}.png"):
            index += 1
        pyplot.figure(number).savefig(place)
        saved.append({"path": os.path.basename(place), "bytes": os.stat(place).st_size, "kind": "file"})
    pyplot.close("all")
    return saved


def _described(error: BaseException) -> dict[str, Any]:
    described: dict[str, Any] = {"exception": type(error).__name__, "number": None}
    if isinstance(error, MemoryError):
        described["exception"] = "MemoryError"
    if isinstance(error, OSError) and isinstance(error.errno, int):
        described["number"] = error.errno
    if isinstance(error, RuntimeError) and "start new thread" in str(error.args):
        described["exception"] = "NoThread"
    return described


def _main_module() -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def _streams() -> None:
    """Text streams that take any character, and show at once what was written."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)
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
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


def _open(path: str, flags: int, *, make: bool = False) -> int:
    """A descriptor of the file at `path` of the workspace; no link is followed on the way or at its end."""
    if path.startswith("/"):
        inside = os.path.relpath(path, WORKSPACE)
        if inside.split("/")[0] == "..":
            raise ValueError(f"{path}: outside the workspace; give a path within it")
        path = inside
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path}: outside the workspace; give a path without ..")
    folder = os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY)
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if make and not last:
            try:
                os.mkdir(part, 0o755, dir_fd=folder)
            except FileExistsError:
                pass
        way = flags | os.O_NONBLOCK if last else os.O_RDONLY | os.O_DIRECTORY
        try:
            inner = os.open(part, way | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        except OSError as error:
            here = "/".join(parts[: index + 1])
            try:
                link = stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode)
            except OSError:
                link = False
            raise ValueError(
                f"{here}: {'a symbolic link, which is not followed' if link else error.strerror}"
            ) from error
        os.close(folder)
        folder = inner
    return folder


def _write(request: dict[str, Any]) -> dict[str, Any]:
    data = frames.to_bytes(request["data"])
    descriptor = _open(request["path"], os.O_WRONLY | os.O_CREAT, make=True)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError(f"{request['path']}: not a regular file")
    os.ftruncate(descriptor, 0)
    with open(descriptor, "wb") as file:
        file.write(data)
    return {"bytes": len(data)}


def _read(request: dict[str, Any]) -> dict[str, Any]:
    descriptor = _open(request["path"], os.O_RDONLY)
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{request['path']}: a folder")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{request['path']}: not a regular file")
    if status.st_size > request["most"]:
        raise ValueError(f"{request['path']}: {status.st_size} bytes, more than {request['most']}")
    with open(descriptor, "rb") as file:
        return {"data": frames.to_text(file.read(request["most"]))}


def _list(request: dict[str, Any]) -> dict[str, Any]:
    """Files and links below a folder, by path; at most _MOST_LISTED of them."""
    top = _open(request["path"], os.O_RDONLY | os.O_DIRECTORY)
    prefix = "/".join(part for part in request["path"].removeprefix(WORKSPACE).split("/") if part not in ("", "."))
    found: list[dict[str, Any]] = []
    for folder, folders, names, descriptor in os.fwalk(".", dir_fd=top):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", ".pytest_cache"))
        for name in sorted(names):
            if len(found) == _MOST_LISTED:
                return {"files": found, "more": True}
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            path = "/".join(part for part in (prefix, folder.removeprefix(".").lstrip("/"), name) if part)
            kind = "file" if stat.S_ISREG(status.st_mode) else "link" if stat.S_ISLNK(status.st_mode) else "other"
            found.append({"path": path, "bytes": status.st_size, "kind": kind})
    return {"files": found, "more": False}


_FILES = {"write": _write, "read": _read, "list": _list}
