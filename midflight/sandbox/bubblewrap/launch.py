"""Starts bubblewrap as an ordinary user where the agent is root; run as a script, never imported.

As root the kernel counts no processes, and a way out of the sandbox would lead to root. So: in a mount namespace of its
own, show what will be bound under one folder that everybody may enter, for the interpreter may lie in root's home; give
up root; execute. Nothing of this is seen outside, and nothing of it is left.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

NOBODY = 65534
STAGE = "/tmp"


def main(binds: list[list[str]], command: list[str]) -> None:
    """Execute `command` with a `--ro-bind` for each of `binds` put in place of its word `BINDS`."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    linux = importlib.import_module("inside.linux")
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    held = [os.open(source, os.O_PATH) for source, _ in binds]
    linux.mount("stage", STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755")
    words: list[str] = []
    for index, (_, target) in enumerate(binds):
        place = f"{STAGE}/{index}"
        if os.path.isdir(f"/proc/self/fd/{held[index]}"):
            os.mkdir(place, 0o755)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/proc/self/fd/{held[index]}", place, None, linux.MS_BIND | linux.MS_REC)
        os.close(held[index])
        words += ["--ro-bind", place, target]
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    at = command.index("BINDS")
    os.execve(command[0], [*command[:at], *words, *command[at + 1 :]], {})


if __name__ == "__main__":
    os.umask(0o022)
    given = json.loads(sys.argv[1])
    main(given["binds"], given["command"])
