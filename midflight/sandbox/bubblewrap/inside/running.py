"""Runs one program as `__main__`, once. Imports nothing beside it, so any Python can use it."""

from __future__ import annotations
import __future__

import ast
import builtins
import errno
import io
import linecache
import os
import sys
import traceback
import types
from typing import Any

NAME = "<program>"
WORKSPACE = "/workspace"
_FEATURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names) & ~0x10
"""Flags of `from __future__ import ...`; 0x10 is the one of `nested_scopes`, which also means something else."""


def run_code(source: str, namespace: dict[str, Any], figures: bool) -> tuple[int, dict[str, Any]]:
    """Run a program once; the value of a last expression is printed as the interactive interpreter prints it."""
    linecache.cache[NAME] = (len(source), None, list(io.StringIO(source, newline=None)), NAME)
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
        try:
            exec(body, namespace)
            if shown is not None:
                exec(shown, namespace)
        except SystemExit as end:
            if code := _exit_code(end):
                return code, {}
        return 0, {"files": save_figures() if figures else []}
    except BaseException as error:
        problem = described(error)
        trace = error.__traceback__.tb_next if running and error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace)
        return 1, problem


def _exit_code(end: SystemExit) -> int:
    """The code that a process has which ends so; what is no code is printed."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


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


def described(error: BaseException) -> dict[str, Any]:
    """Class of an exception, and the name of its errno, whose number is another on other systems."""
    described: dict[str, Any] = {"exception": type(error).__name__, "number": None}
    if isinstance(error, MemoryError):
        described["exception"] = "MemoryError"
    if isinstance(error, OSError) and isinstance(error.errno, int):
        described["number"] = errno.errorcode.get(error.errno)
    if isinstance(error, RuntimeError) and "start new thread" in str(error.args):
        described["exception"] = "NoThread"
    return described


def main_module() -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__
