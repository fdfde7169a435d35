"""Errors the command line prints as one line: what a user can put right (code 2), what had to stop or is down (1)."""

from __future__ import annotations

import difflib
import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from midflight.slips import without_keys

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says when a disk, a quota or a size limit is full."""


DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What comes of reading a file that may hold anything."""


class UserError(ValueError):
    """Something the user gave is wrong; the message is one line that says what, and what to do, and shows no key."""

    def __init__(self, message: str) -> None:
        super().__init__(without_keys(" ".join(message.split())))


@contextmanager
def reading(file: Path, remedy: str) -> Iterator[None]:
    """Around what reads a file of ours, and makes of it what it should hold.

    Raises:
        UserError: it holds something else; the line ends in `remedy`.
    """
    try:
        yield
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}: {error}); {remedy}") from error


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question and a space, for the middle of a message; empty where none of `names` is like `name`."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


class InfrastructureError(Exception):
    """Raised where a service the agent depends on is down (sandbox, search provider): not the planner's mistake."""


class GivenUp(InfrastructureError):
    """Who raises it has tried again already, or trying again is of no use: nobody retries."""


class TrainingStopped(RuntimeError):
    """Training cannot go on with numbers it can vouch for, or keep them; one line as message. What is saved stays."""


class CannotWrite(TrainingStopped):
    """A file of the run cannot be written: the disk is full, or broken. Earlier checkpoints stay as they are."""

    def __init__(self, path: Path, error: Exception) -> None:
        there = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
        free = shutil.disk_usage(there).free / 1e6
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        super().__init__(
            f"{path}: cannot be written ({' '.join(reason.split())[:200]}; {free:,.1f} MB free there); what was saved "
            "before is kept: make room, then go on with --resume"
        )
