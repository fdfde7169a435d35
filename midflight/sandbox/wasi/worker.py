"""The process that holds one WebAssembly run; started as a script, with an empty environment, never imported.

`worker.py PACKAGES compile WASM OUT` compiles the interpreter once. `worker.py PACKAGES run CODE LIMITS FOLDER` runs
/program/main.py in it: FOLDER/program is read-only, FOLDER/workspace and FOLDER/reply can be written.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from typing import Any

TRAPPED = 70
"""Exit code of a run that WebAssembly ended: a stack too deep, or an interpreter that broke."""


def compile_module(wasmtime: Any, source: str, target: str) -> int:
    module = wasmtime.Module.from_file(wasmtime.Engine(), source)
    beside = f"{target}.{os.getpid()}"
    with open(beside, "wb") as file:
        file.write(module.serialize())
    os.replace(beside, target)
    return 0


def run(wasmtime: Any, code: str, limits: dict[str, int], folder: str) -> int:
    engine = wasmtime.Engine()
    module = wasmtime.Module.deserialize_file(engine, code)
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
    try:
        start(store)
    except wasmtime.ExitTrap as ended:
        return int(ended.code)
    except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
        print(str(error).strip().splitlines()[-1], file=sys.stderr)
        return TRAPPED
    return 0


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    package = importlib.import_module("wasmtime")
    if sys.argv[2] == "compile":
        sys.exit(compile_module(package, *sys.argv[3:]))
    sys.exit(run(package, sys.argv[3], json.loads(sys.argv[4]), sys.argv[5]))
