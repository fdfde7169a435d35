"""Runs a script as the user nobody, who may not enter root's home: `as_nobody.py TREES PACKAGES SCRIPT`.

The trees (a JSON list of folders) are shown at their own places in a mount namespace of this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from midflight.sandbox.bubblewrap.inside import linux  # noqa: E402


def show(trees: list[str]) -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    held = {tree: os.open(tree, os.O_PATH) for tree in trees}
    closed = {str(closed_above(Path(tree))) for tree in trees} - {"None"}
    for folder in sorted(closed):
        linux.mount("none", folder, "tmpfs", 0, "mode=0755")
    for tree, descriptor in held.items():
        if any(Path(tree).is_relative_to(folder) for folder in closed):
            os.makedirs(tree, exist_ok=True)
            linux.mount(f"/proc/self/fd/{descriptor}", tree, None, linux.MS_BIND)


def closed_above(tree: Path) -> Path | None:
    """The outermost folder on the way to `tree` that others may not enter."""
    way = [*reversed(tree.parents), tree]
    return next((folder for folder in way if not folder.stat().st_mode & 0o001), None)


if __name__ == "__main__":
    os.umask(0o022)
    given, packages, script = sys.argv[1:]
    show(json.loads(given))
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    os.execve(sys.executable, [sys.executable, script], environment)
