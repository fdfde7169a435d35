"""The command line. Each command checks all it was given, then imports what it needs, then works.

Invariant: what the user can put right is one line on stderr and exit code 2; Ctrl-C, SIGTERM and SIGHUP are one line
and exit code 130, 143 and 129.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import typer

from midflight import signals
from midflight.cli.app import app
from midflight.cli.ending import SIGNALLED, fail, interrupted
from midflight.engines.base import EngineError, PromptTooLong
from midflight.errors import NO_ROOM, TrainingStopped, UserError
from midflight.tools.base import InfrastructureError

ClickException: type[BaseException] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""Base of what typer raises for a wrong command line; newer versions carry their own click."""


def main() -> None:
    """The console script."""
    _streams()
    signals.catch()
    code = run(sys.argv[1:])
    if code > SIGNALLED:  # the engine's thread may be in the middle of a batch that nobody waits for any more
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _streams() -> None:
    """Make output that cannot fail: into nothing where a daemon's was closed, and with escapes for what a model wrote
    and the terminal's encoding has not."""
    for descriptor in range(3):  # else the next file that is opened would be in its place
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(list(arguments) or ["--help"], prog_name="midflight", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return fail(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("midflight"):
            raise
        return fail(f"{error.name} is not installed; run pip install 'midflight[train,tools,engines]'", 2)
    except OSError as error:
        if error.errno in NO_ROOM:
            return fail(f"{error.filename or 'a file'}: {error.strerror}; make room, then try again", 1)
        if error.filename is None:
            raise
        return fail(f"{error.filename}: {error.strerror}; name another file or folder, or change its rights", 2)
    except (EngineError, InfrastructureError, PromptTooLong, TrainingStopped) as error:
        return fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        return fail(*interrupted())
    except ClickException as error:
        message = str(getattr(error, "format_message", error.__str__)())
        return fail(f"{message} See midflight --help." if message else "see midflight --help.", 2)
