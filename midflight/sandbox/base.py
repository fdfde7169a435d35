"""What a sandbox is: a place where code that a model wrote runs, with nothing of the agent's in reach.

A `Sandbox` opens `Session`s. A session is one trajectory's: private files under /workspace, private processes; it
runs one request after the other. Invariant: whatever a program does is a `SandboxResult` with an outcome; only a
sandbox that cannot be had raises, InfrastructureError.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

CLOSED = "the sandbox was closed during this call"
"""What InfrastructureError says of a request whose session the agent's own side closed."""


MOST_OUTPUT = 16 * 2**20
"""Bytes of standard output, and of standard error, that an answer of a session has room for."""
MOST_READ = 32 * 2**20
"""Bytes of a file that an answer has room for."""


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    """It ended by itself, with exit code 0."""
    ERROR = "error"
    """It ended by itself: an exception nobody caught, another exit code, or a file that cannot be had."""
    WALL_LIMIT = "wall_limit"
    """It took longer than `wall_seconds` and was killed."""
    CPU_LIMIT = "cpu_limit"
    """Its processes together used more than `cpu_seconds` and were killed."""
    MEMORY_LIMIT = "memory_limit"
    """It asked for more memory than it may have: refused, or killed."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than `output_bytes` and was killed; the beginning is kept."""
    PROCESS_LIMIT = "process_limit"
    """The exception nobody caught: no more processes or threads."""
    FILE_LIMIT = "file_limit"
    """The exception nobody caught: a file too large, too many files, or no room left."""
    KILLED = "killed"
    """A signal ended it, or it took its session down; then the session's files and state are lost."""


@dataclass(frozen=True)
class Limits:
    """What one request may take, all its processes together where nothing else is said."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 512 * 2**20
    """Beyond what the warm interpreter holds; for each process as address space and for all together as memory used."""
    processes: int = 32
    """Processes and threads at a time."""
    file_bytes: int = 32 * 2**20
    """Of one file."""
    output_bytes: int = 2**20
    """Of standard output, and of standard error; at most `MOST_OUTPUT`."""
    open_files: int = 256
    """In each process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} = {value} must be above 0")
        if self.output_bytes > MOST_OUTPUT:
            raise ValueError(f"output_bytes = {self.output_bytes} must be at most {MOST_OUTPUT}")


@dataclass(frozen=True)
class Python:
    """Run `code` once, as a program of its own. The value of a last expression is printed as `>>>` does.

    `keep_state`: in the interpreter that this session keeps, which knows the variables of earlier such calls.
    `figures`: save the figures that are open in pyplot when it ends well as /workspace/figure-N.png; they are the
    `files` of the result.
    """

    code: str
    stdin: str = ""
    keep_state: bool = False
    figures: bool = False


@dataclass(frozen=True)
class Command:
    """Run a command in /workspace; the first word is looked up on the sandbox's path."""

    words: tuple[str, ...]
    stdin: str = ""


@dataclass(frozen=True)
class WriteFile:
    """Write a file of the workspace, and the folders to it.

    `start`: what the file holds before that byte stays. `executable`: it is made so; else it is what it was, a new one
    is not.
    """

    path: str
    data: bytes
    start: int = 0
    executable: bool = False


@dataclass(frozen=True)
class ReadFile:
    """Read a file of the workspace of at most `most` bytes, and never more than `MOST_READ`, into `SandboxResult.data`.

    `start`: read the `most` bytes from there on, or what there is of them, of a file of any size.
    """

    path: str
    most: int = 8 * 2**20
    start: int | None = None


@dataclass(frozen=True)
class ListFiles:
    """List what is below a folder of the workspace into `SandboxResult.files`, without the first `skip` of it."""

    path: str = "."
    skip: int = 0


@dataclass(frozen=True)
class RunTests:
    """Run pytest in /workspace on these paths or node ids, on all without any; into `SandboxResult.tests`."""

    paths: tuple[str, ...] = ()


Request = Python | Command | RunTests | WriteFile | ReadFile | ListFiles


@dataclass(frozen=True)
class File:
    """An entry of a workspace: `kind` is file, link or other. A path with a backslash in it may be one spelt out."""

    path: str
    size: int
    kind: str = "file"


@dataclass(frozen=True)
class TestOutcome:
    """What pytest says of one test: `outcome` is passed, failed, skipped or error; `message` is why."""

    __test__ = False

    name: str
    outcome: str
    message: str = ""


@dataclass(frozen=True)
class SandboxResult:
    """What came of a request. Texts hold no control characters but newline and tab, so a terminal may show them."""

    outcome: Outcome
    out: str = ""
    err: str = ""
    exit_code: int | None = None
    """None when it was killed."""
    exception: str = ""
    """Class of the exception that ended a program."""
    problem: str = ""
    """One line, when the outcome is not OK."""
    seconds: float = 0.0
    data: bytes = b""
    files: tuple[File, ...] = ()
    more_files: bool = False
    """There are more than `files` holds."""
    tests: tuple[TestOutcome, ...] = ()
    """Where they are too many for an answer, some of those that passed are left out, and then others."""
    test_counts: Mapping[str, int] = field(default_factory=dict)
    """How many tests had which outcome, those that are left out too."""
    state_kept: bool = False
    """Whether variables of `keep_state` programs are still there."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK


class Session(Protocol):
    """Private files and processes, until it is closed. Its requests run one at a time, in order."""

    @property
    def lost(self) -> bool:
        """Whether it died; its files are gone and each further request is refused as KILLED."""

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """Run `request` under these limits, or the sandbox's.

        Waiting for other requests does not count as its time. Cancelling it while it runs ends the session.

        Raises:
            InfrastructureError: the sandbox broke, or was closed meanwhile.
        """

    async def close(self) -> None:
        """End every process and remove every file; once is enough, more do no harm."""


class Sandbox(Protocol):
    """Where sessions come from. One object serves any number of event loops and trajectories."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def limits(self) -> Limits:
        """What a request may take where nothing else is said."""

    @property
    def full(self) -> bool:
        """Whether it does every request; without it, programs of their own and files, and no packages to import."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions that programs may import beside the standard library."""

    async def open(self) -> Session:
        """A session with an empty workspace.

        Raises:
            InfrastructureError: it cannot be had.
        """

    async def run(self, request: Request, limits: Limits | None = None) -> SandboxResult:
        """`request` in a session of its own, closed behind it.

        Raises:
            InfrastructureError: the sandbox broke.
        """

    def close(self) -> None:
        """End all sessions and what is warm. A sandbox that is used again starts again."""


_UNUSUAL = re.compile(r"[^\n\t -~]")
_UNUSUAL_IN_NAMES = re.compile(r"[^ -~]")


def printable(data: bytes) -> str:
    """Bytes of a program as text: bad UTF-8 replaced, and `spelt_out`."""
    return spelt_out(data.decode("utf-8", "replace"))


def spelt_out(text: str) -> str:
    """Text of a program with control and direction characters and lone surrogates spelt out, `\\r\\n` as newline.

    So output cannot move a terminal's cursor, hide text or speak to it, and any stream takes it.
    """
    return _UNUSUAL.sub(lambda match: _shown(match[0]), text.replace("\r\n", "\n"))


def spelt_out_name(name: str) -> str:
    """A path, with newlines and tabs spelt out too: it is one line, and without a backslash in it the file's own."""
    return _UNUSUAL_IN_NAMES.sub(lambda match: _shown(match[0]), name)


@functools.lru_cache(4096)
def _shown(one: str) -> str:
    hidden = unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp") and one not in "\u200c\u200d"
    return one.encode("unicode_escape").decode() if hidden else one
