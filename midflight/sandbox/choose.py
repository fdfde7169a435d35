"""Which sandbox: bubblewrap, else WASI, else a refusal that says what to install; nothing only by a flag called unsafe.

Whether bubblewrap works is tried, not guessed: the kernel's settings or a container may forbid user namespaces.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from midflight.errors import InfrastructureError, UserError
from midflight.sandbox import wasi
from midflight.sandbox.base import Limits, Python, Request, Sandbox, SandboxResult, Session
from midflight.sandbox.bubblewrap import PRELOAD, Box, BubblewrapSandbox, missing
from midflight.sandbox.options import SandboxOptions
from midflight.sandbox.unsafe import UnsafeSandbox
from midflight.sandbox.wasi import WasiSandbox

KINDS = ("auto", "bubblewrap", "wasi", "none")


class SharedSandbox:
    """See `Sandbox`: one of several handles on one sandbox, which ends when each that used it is closed.

    Handles on one sandbox are equal. One that is used after its close shares again.
    """

    def __init__(self, common: _Common) -> None:
        self._common = common
        self._held: Sandbox | None = None

    @property
    def inner(self) -> Sandbox:
        """The sandbox itself."""
        return self._held or self._common.sandbox

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    @property
    def full(self) -> bool:
        return self.inner.full

    @property
    def packages(self) -> tuple[str, ...]:
        return self.inner.packages

    async def open(self) -> Session:
        """See `Sandbox.open`."""
        return await self._use().open()

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """See `Sandbox.run`."""
        return await self._use().run(request, limits)

    def close(self) -> None:
        """Let go of it; the last to do so ends it."""
        with self._common.lock:
            held, self._held = self._held, None
            if held is None:
                return
            self._common.users -= 1
            if self._common.users:
                return
            self._common.sandbox = self._common.make()  # not started: whoever comes meanwhile is not ended too
        held.close()

    def _use(self) -> Sandbox:
        with self._common.lock:
            if self._held is None:
                self._held = self._common.sandbox
                self._common.users += 1
            return self._held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedSandbox) and other._common is self._common

    def __hash__(self) -> int:
        return hash(id(self._common))


class _Common:
    """What the handles on one sandbox share; `users` are those that used it and are not closed."""

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        self.make, self.sandbox = make, make()
        self.users, self.lock = 0, threading.Lock()


def shared_sandbox(options: SandboxOptions) -> SharedSandbox:
    """A handle on the sandbox of these options, one for the whole process: warm sessions and turns are shared.

    Raises:
        UserError: there is no such kind, it does not work here, or a value is out of bounds.
    """
    return SharedSandbox(_common(options.model_copy(update={"files": None, "keep": None})))  # a workspace's own


@functools.cache
def _common(options: SandboxOptions) -> _Common:
    limits = options.limits()
    preload = tuple(name for name in PRELOAD if name.partition(".")[0] in options.packages)
    box = Box(options.packages, preload, disk_bytes=options.disk_mb * 2**20)
    running, unsafe = options.running, options.unsafe_no_sandbox
    return _Common(lambda: choose_sandbox(options.kind, limits, box, running=running, unsafe_no_sandbox=unsafe))


def choose_sandbox(
    kind: str = "auto",
    limits: Limits | None = None,
    box: Box | None = None,
    *,
    running: int | None = None,
    unsafe_no_sandbox: bool = False,
) -> Sandbox:
    """A sandbox of this kind; `auto` takes the first that works.

    Raises:
        UserError: there is no such kind, or it does not work here; the message says what to do.
    """
    if kind not in KINDS:
        raise UserError(f"agent.sandbox.kind = {kind}: choose one of {', '.join(KINDS)}")
    if unsafe_no_sandbox != (kind == "none"):
        raise UserError(
            "agent.sandbox.kind = none runs code that a model wrote as you, with your files, keys and network; it "
            "takes agent.sandbox.unsafe_no_sandbox = true too, which goes with none alone"
        )
    if kind == "none":
        return UnsafeSandbox(limits)
    problem = bubblewrap_problem() if kind != "wasi" else ""
    if kind != "wasi" and not problem:
        return BubblewrapSandbox(limits, box, running=running)
    lacking = wasi.missing() if kind != "bubblewrap" else ""
    if kind != "bubblewrap" and not lacking:
        box = box or Box()
        return WasiSandbox(limits, disk_bytes=box.disk_bytes, disk_files=box.disk_files, running=running)
    problems = "; or ".join(one for one in (problem, lacking) if one)
    raise UserError(f"no sandbox for code that a model writes: {problems}")


@functools.cache
def bubblewrap_problem() -> str:
    """Why bubblewrap cannot be used on this machine, and what to do, on one line; empty when it works."""
    lacking = missing()
    if lacking:
        return f"bubblewrap is not ready: {lacking}"
    try:
        with BubblewrapSandbox(box=Box(packages=(), preload=()), warm=0, running=1) as sandbox:
            result = sandbox.run_blocking(Python("print(6 * 7)"))
    except InfrastructureError as error:
        return (
            f"{error}; user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1 on older Debian, an "
            "AppArmor profile for bwrap on Ubuntu, --privileged or a seccomp profile that allows them in a container"
        )
    return "" if result.out == "42\n" else f"bubblewrap starts, but a program in it does not run: {result.problem}"
