"""The process that holds one WebAssembly run; started as a script, with an empty environment, never imported.

`worker.py AGENT SECONDS PACKAGES compile WASM OUT` compiles the interpreter once. `... run CODE LIMITS FOLDER` runs
/program/main.py in it: FOLDER/program is read-only, FOLDER/workspace and FOLDER/reply can be written. In FOLDER itself,
which the program cannot reach, it leaves `loaded` once CODE is, and `begun` before the program's first line. Both end
with the process AGENT, and after SECONDS (`watch`).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from typing import Any


def compile_module(wasmtime: Any, source: str, target: str) -> int:
    module = wasmtime.Module.from_file(wasmtime.Engine(), source)
    beside = f"{target}.{os.getpid()}"
    try:
        with open(beside, "wb") as file:
            file.write(module.serialize())
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine could leave the name without what it stands for
        os.replace(beside, target)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)
    return 0


def run(wasmtime: Any, code: str, limits: dict[str, int], folder: str) -> int:
    engine = wasmtime.Engine()
    module = wasmtime.Module.deserialize_file(engine, code)
    open(os.path.join(folder, "loaded"), "xb").close()
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    for which, most in (
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (most, most))
    store = wasmtime.Store(engine)
    store.set_limits(memory_size=limits["memory_bytes"])
    wasi = wasmtime.WasiConfig()
    wasi.argv = ("python", "-I", "-S", "-B", "/program/main.py")
    wasi.env = (("HOME", "/workspace"), ("PYTHONDONTWRITEBYTECODE", "1"))
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    wasi.preopen_dir(os.path.join(folder, "program"), "/program", False)
    wasi.preopen_dir(os.path.join(folder, "workspace"), "/workspace")
    wasi.preopen_dir(os.path.join(folder, "reply"), "/reply")
    store.set_wasi(wasi)
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    start = linker.instantiate(store, module).exports(store)["_start"]
    open(os.path.join(folder, "begun"), "xb").close()
    try:
        start(store)
    except wasmtime.ExitTrap as ended:
        return int(ended.code)
    except (wasmtime.Trap, wasmtime.WasmtimeError) as error:  # a stack too deep, or an interpreter that broke
        print(str(error).strip().splitlines()[-1], file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # no exit code, which a program could give as well
    return 0


if __name__ == "__main__":
    agent, seconds, packages, task, *words = sys.argv[1:]
    sys.path += [packages, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "folder")]
    importlib.import_module("watch").end_with(int(agent), float(seconds))
    package = importlib.import_module("wasmtime")
    if task == "compile":
        sys.exit(compile_module(package, *words))
    sys.exit(run(package, words[0], json.loads(words[1]), words[2]))
