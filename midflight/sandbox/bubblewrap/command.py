"""The command that starts the outer box: what of the host is bound in it, what its environment is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from midflight.sandbox.bubblewrap import interpreter

_HERE = Path(__file__).resolve().parent
_SYSTEM = ("/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_USER = ("--uid", "1000", "--gid", "1000")


def command(python: interpreter.Inside, descriptor: int) -> list[str]:
    """The command that starts the outer box."""
    bwrap = shutil.which("bwrap")
    assert bwrap is not None, "missing() has looked"
    binds = [*python.binds, (str(_HERE / "inside"), "/opt/midflight/inside")]
    binds += [(place, place) for place in _SYSTEM if os.path.exists(place)]
    environment: dict[str, str] = {
        "PATH": f"{interpreter.BINARIES}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/workspace",
        "TMPDIR": "/tmp",
        "XDG_CACHE_HOME": "/tmp/.cache",
        "LANG": "C.UTF-8",
        "PYTHONPATH": interpreter.SITE,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": "/tmp/.cache/matplotlib",
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
