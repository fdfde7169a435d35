"""Which sandbox: bubblewrap, or a refusal that says what to install. Never nothing, unless a flag called unsafe asks.

Whether bubblewrap works is tried, not guessed: the kernel's settings or a container may forbid user namespaces.
"""

from __future__ import annotations

import functools

from midflight.errors import InfrastructureError, UserError
from midflight.sandbox import bubblewrap
from midflight.sandbox.base import Limits, Python, Sandbox
from midflight.sandbox.bubblewrap import Box, BubblewrapSandbox
from midflight.sandbox.unsafe import UnsafeSandbox

KINDS = ("auto", "bubblewrap", "none")


def choose_sandbox(
    kind: str = "auto", limits: Limits | None = None, box: Box | None = None, *, unsafe_no_sandbox: bool = False
) -> Sandbox:
    """The sandbox of this kind; `auto` takes the first that works.

    `none` runs programs as the agent's user with all it may do, and is refused without `unsafe_no_sandbox`.

    Raises:
        UserError: there is no such kind, or it does not work here; the message says what to do.
    """
    if kind not in KINDS:
        raise UserError(f"sandbox = {kind!r}: choose one of {', '.join(KINDS)}")
    if unsafe_no_sandbox != (kind == "none"):
        raise UserError(
            "sandbox = none runs code that a model wrote as you, with your files, keys and network; "
            "it takes both sandbox = none and unsafe_no_sandbox = true"
        )
    if kind == "none":
        return UnsafeSandbox(limits)
    problem = bubblewrap_problem()
    if problem:
        raise UserError(f"no sandbox for code that a model writes: {problem}")
    return BubblewrapSandbox(limits, box)


@functools.cache
def bubblewrap_problem() -> str:
    """Why bubblewrap cannot be used on this machine, and what to do, on one line; empty when it works."""
    problem = bubblewrap.missing()
    if problem:
        return f"bubblewrap is not ready: {problem}"
    try:
        works = _probe()
    except InfrastructureError as error:
        return (
            f"{error}; user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1 on older Debian, an "
            "AppArmor profile for bwrap on Ubuntu, --privileged or a seccomp profile that allows them in a container"
        )
    return "" if works else "bubblewrap starts, but a program in it does not run"


def _probe() -> bool:
    with BubblewrapSandbox(box=Box(packages=(), preload=()), warm=0, running=1) as sandbox:
        return sandbox.run_blocking(Python("print(6 * 7)")).out == "42\n"
