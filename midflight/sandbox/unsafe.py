"""No sandbox at all: programs run as the agent's user, with its files and its network. Only for your own code.

A folder of its own, an empty environment and a time limit are accident prevention, not walls. It exists for systems
without any sandbox, and only where `unsafe_no_sandbox` is set.
"""

from __future__ import annotations

import os
import sys

from midflight.paths import remove_ownerless
from midflight.sandbox.base import Limits, Python, Request, SandboxResult
from midflight.sandbox.folder import FOLDERS, FolderSession, answered, run_bounded


class UnsafeSandbox:
    """See `Sandbox`; of the limits only wall clock, output and the size of a written file hold."""

    name = "none (unsafe)"
    full = False

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
    async def _python(self, request: Python, limits: Limits) -> SandboxResult:
        environment = {"PATH": os.defpath, "HOME": str(self._workspace), "LANG": "C.UTF-8"}
        command = (sys.executable, "-I", "-c", request.code)
        ended = await run_bounded(command, environment, self._workspace, request.stdin.encode(), limits)
        return answered(request, limits, ended, b"")
