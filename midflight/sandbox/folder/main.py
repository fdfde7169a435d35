"""Runs program/code.py of a session's folder by `running.run_code`, in the folder workspace; what to say of it goes to
reply/reply. In WebAssembly as it is; without a sandbox as `main.py AGENT SECONDS`, see `watch`.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main() -> int:
    sys.path.insert(0, os.path.join(ROOT, "program"))
    running = importlib.import_module("running")
    if sys.argv[1:]:
        importlib.import_module("watch").end_with(int(sys.argv[1]), float(sys.argv[2]))
    sys.path[0] = os.path.join(ROOT, "workspace")
    os.chdir(sys.path[0])
    sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)
    sys.stdout = open(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    with open(os.path.join(ROOT, "program", "code.py"), "rb") as file:
        source = base64.b64decode(file.read()).decode("utf-8", "surrogatepass")
    sys.argv = [""]
    code, problem = running.run_code(source, running.main_module(), False)
    body = json.dumps(problem).encode()
    with open(os.path.join(ROOT, "reply", "reply"), "wb") as file:
        file.write(len(body).to_bytes(4, "big") + body)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
