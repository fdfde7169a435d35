"""No sandbox at all: programs run as the agent's user, with its files and its network. Only for your own code.

A folder of its own, an empty environment, a time limit and the kernel's limits of one process are accident prevention,
not walls. It exists for systems without any sandbox, and only by the name `unsafe-none`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from midflight.sandbox.base import (
    Command,
    File,
    Limits,
    ListFiles,
    Outcome,
    Python,
    ReadFile,
    Request,
    RunTests,
    SandboxResult,
    WriteFile,
    printable,
)


class UnsafeSandbox:
    """See `Sandbox`; of the limits only wall clock and output hold."""

    name = "unsafe-none"

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    async def open(self) -> UnsafeSession:
        """See `Sandbox.open`."""
        return UnsafeSession(self.limits, Path(tempfile.mkdtemp(prefix="midflight-unsafe-")))

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Sandbox.run`."""
        session = await self.open()
        try:
            return await session.run(request, limits)
        finally:
            await session.close()

    def close(self) -> None:
        """Nothing to end."""


class UnsafeSession:
    """See `Session`."""

    lost = False

    def __init__(self, limits: Limits, folder: Path) -> None:
        self._limits, self._folder = limits, folder

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Session.run`."""
        match request:
            case Python(keep_state=True) | Python(figures=True):
                return SandboxResult(Outcome.ERROR, problem="unsafe-none keeps no state and saves no figures")
            case RunTests():
                return SandboxResult(Outcome.ERROR, problem="unsafe-none runs no tests; run pytest as a command")
            case Python(code, stdin):
                command = (sys.executable, "-I", "-c", code)
            case Command(command, stdin):
                pass
            case _:
                return self._touch(request)
        return await asyncio.to_thread(self._execute, command, stdin, limits or self._limits)

    async def close(self) -> None:
        """See `Session.close`."""
        await asyncio.to_thread(shutil.rmtree, self._folder, True)

    def _execute(self, command: tuple[str, ...], stdin: str, limits: Limits) -> SandboxResult:
        began = time.monotonic()
        environment = {"PATH": os.defpath, "HOME": str(self._folder), "LANG": "C.UTF-8"}
        try:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return SandboxResult(Outcome.ERROR, problem=f"{command[0]}: {error.strerror}")
        late = False
        try:
            out, err = process.communicate(stdin.encode(), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            late = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if late:
            out, err = process.communicate()
        code = process.returncode
        outcome = Outcome.WALL_LIMIT if late else Outcome.OK if code == 0 else Outcome.ERROR
        return SandboxResult(
            outcome,
            out=printable(out[: limits.output_bytes]),
            err=printable(err[: limits.output_bytes]),
            exit_code=None if late or code < 0 else code,
            problem=f"killed after {limits.wall_seconds:g} s" if late else "" if code == 0 else f"exit code {code}",
            seconds=time.monotonic() - began,
        )

    def _touch(self, request: WriteFile | ReadFile | ListFiles) -> SandboxResult:
        place = (self._folder / request.path).resolve()
        if not place.is_relative_to(self._folder.resolve()):
            return SandboxResult(Outcome.ERROR, problem=f"{request.path}: outside the workspace")
        try:
            match request:
                case WriteFile(_, data):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(data)
                    return SandboxResult(Outcome.OK)
                case ReadFile():
                    return SandboxResult(Outcome.OK, data=place.read_bytes())
                case _:
                    files = sorted(one for one in place.rglob("*") if one.is_file())
                    found = (File(str(one.relative_to(self._folder)), one.stat().st_size) for one in files)
                    return SandboxResult(Outcome.OK, files=tuple(found))
        except OSError as error:
            return SandboxResult(Outcome.ERROR, problem=f"{request.path}: {error.strerror}")
