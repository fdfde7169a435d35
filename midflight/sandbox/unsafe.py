"""No sandbox at all: programs run as the agent's user, with its files and its network. Only for your own code.

A folder of its own, an empty environment and a time limit are accident prevention, not walls: what a program starts in
a process group of its own goes on when the program has ended. It exists for systems without any sandbox, and only where
`unsafe_no_sandbox` is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from midflight.paths import remove_ownerless
from midflight.sandbox.base import Limits, Request, SandboxResult
from midflight.sandbox.folder import FOLDERS, GRACE_SECONDS, FolderSession


class UnsafeSandbox:
    """See `Sandbox`; of the limits only wall clock, output and the size of a written file hold."""

    name = "none (unsafe)"
    full = False
    packages = ()

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        remove_ownerless(FOLDERS)

    async def open(self) -> FolderSession:
        """See `Sandbox.open`."""
        return _Session(self.limits, self.name)

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Sandbox.run`."""
        session = await self.open()
        try:
            return await session.run(request, limits)
        finally:
            await session.close()

    def close(self) -> None:
        """Nothing to end."""


class _Session(FolderSession):
    def _command(self, limits: Limits) -> Sequence[str]:
        own = (str(os.getpid()), str(limits.wall_seconds + GRACE_SECONDS))
        return (sys.executable, "-I", "-B", str(self._program / "main.py"), *own)

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.defpath, "HOME": str(self._workspace), "LANG": "C.UTF-8"}
