"""What a recipe says of the sandbox."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from midflight.sandbox.base import MOST_OUTPUT, Limits
from midflight.section import MOST_SECONDS, Section

PACKAGES = ("numpy", "sympy", "matplotlib", "pytest")
"""What programs may import beside the standard library, unless a recipe says otherwise."""


def _name(package: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise ValueError("must be the name of a distribution alone, such as numpy")
    return package


def _path(folder: str) -> str:
    if not folder or "\0" in folder:
        raise ValueError("must be the path of a folder")
    return folder


Package = Annotated[str, AfterValidator(_name)]
Folder = Annotated[str, AfterValidator(_path)]


class SandboxOptions(Section):
    """Where code that a model wrote runs, and what it may take; of `python`, `shell` and the tools beside them."""

    kind: Literal["auto", "bubblewrap", "wasi", "none"] = "auto"
    """auto: the first that works; bubblewrap; wasi; or none, which takes `unsafe_no_sandbox` too."""
    unsafe_no_sandbox: bool = False
    """Run code that a model wrote as the agent's user, with all its files, keys and network."""
    wall_seconds: float = Field(default=10.0, gt=0, le=MOST_SECONDS)
    """Of one call, and never more than the tool's time limit."""
    cpu_seconds: float = Field(default=10.0, gt=0, le=MOST_SECONDS)
    """Of one call, all its processes together."""
    memory_mb: int = Field(default=512, ge=1, le=1_000_000_000)
    """Of one call, beyond what the warm interpreter holds."""
    processes: int = Field(default=32, ge=1, le=1_000_000)
    """Processes and threads of one call; wasi has none."""
    file_mb: int = Field(default=32, ge=1, le=1_000_000_000)
    """Of one file."""
    output_kb: int = Field(default=1024, ge=1, le=MOST_OUTPUT // 2**10)
    """Of standard output, and of standard error, of one call."""
    disk_mb: int = Field(default=64, ge=1, le=1_000_000_000)
    """Of all files of a trajectory; bubblewrap has them in memory."""
    running: int | None = Field(default=None, ge=1, le=1_000_000)
    """Calls that run at a time; null: the number of cores."""
    packages: tuple[Package, ...] = PACKAGES
    """Distributions that programs may import, with what they require, as far as they are installed beside Midflight;
    wasi has the standard library alone."""
    files: Folder | None = None
    """A folder whose files every trajectory's workspace begins with, as they are when the first one does; relative to
    the recipe. Null: it begins empty."""
    keep: Folder | None = None
    """A folder that the files of each trajectory go to, into its next `workspace-N`; relative to the recipe. Null: they
    die with the trajectory."""

    def limits(self) -> Limits:
        """Of one call."""
        return Limits(
            wall_seconds=self.wall_seconds,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_mb * 2**20,
            processes=self.processes,
            file_bytes=self.file_mb * 2**20,
            output_bytes=self.output_kb * 2**10,
        )
