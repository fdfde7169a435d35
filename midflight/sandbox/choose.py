"""Which sandbox: bubblewrap, else WASI, else a refusal that says what to install; nothing only by a flag called unsafe.

Whether bubblewrap works is tried, not guessed: the kernel's settings or a container may forbid user namespaces.
"""

from __future__ import annotations

import functools

from midflight.errors import InfrastructureError, UserError
from midflight.sandbox import wasi
from midflight.sandbox.base import Limits, Python, Sandbox
from midflight.sandbox.bubblewrap import PRELOAD, Box, BubblewrapSandbox, missing
from midflight.sandbox.options import SandboxOptions
from midflight.sandbox.unsafe import UnsafeSandbox
from midflight.sandbox.wasi import WasiSandbox

KINDS = ("auto", "bubblewrap", "wasi", "none")


@functools.cache
def shared_sandbox(options: SandboxOptions) -> Sandbox:
    """The sandbox of these options, one for the whole process: its tools then share warm sessions and their turns.

    Raises:
        UserError: there is no such kind, it does not work here, or a value is out of bounds.
    """
    limits = options.limits()
    preload = tuple(name for name in PRELOAD if name.partition(".")[0] in options.packages)
    box = Box(options.packages, preload, disk_bytes=options.disk_mb * 2**20)
    return choose_sandbox(
        options.kind, limits, box, running=options.running, unsafe_no_sandbox=options.unsafe_no_sandbox
    )


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
        return WasiSandbox(limits, disk_bytes=(box or Box()).disk_bytes, running=running)
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


@functools.cache
def sandbox_problem() -> str:
    """Why there is no sandbox on this machine, and what to do; empty where there is one."""
    try:
        choose_sandbox().close()
    except UserError as error:
        return str(error)
    return ""
