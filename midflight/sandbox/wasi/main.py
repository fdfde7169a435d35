"""Runs inside WebAssembly, as /program/main.py: the program in /program/code.py, by `running.run_code`."""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys


def main() -> int:
    sys.path.insert(0, "/program")
    running = importlib.import_module("running")
    sys.path[0] = "/workspace"
    os.chdir("/workspace")
    for name, mode in (("stdout", "w"), ("stderr", "w")):
        number = 1 if name == "stdout" else 2
        setattr(sys, name, open(number, mode, 1, encoding="utf-8", errors="backslashreplace", closefd=False))
    with open("/program/code.py", "rb") as file:
        source = base64.b64decode(file.read()).decode("utf-8", "surrogatepass")
    code, problem = running.run_code(source, running.main_module(), False)
    sys.stdout.flush()
    sys.stderr.flush()
    body = json.dumps(problem).encode()
    with open("/reply/reply", "wb") as file:
        file.write(len(body).to_bytes(4, "big") + body)
    return int(code)


if __name__ == "__main__":
    os._exit(main())
