"""The documents of a corpus, read one after another in a process of their own.

Invariant: each file has one outcome, whatever reading it does: one that takes too long or crashes ends that process,
and another reads the rest. The process holds no file of the one that it was forked from, so no lock and no pipe stays
open by it, and ends by itself after its share of processor time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

from midflight.tools.base import ToolError
from midflight.tools.reading.documents import document_text
from midflight.tools.reading.passages import paragraphs

KINDS = {".txt": "text/plain", ".md": "text/plain", ".rst": "text/plain", ".html": "text/html", ".htm": "text/html"}
"""Types of the files that are read; a PDF is told by its content."""
PDF = ".pdf"
LARGEST = 50_000_000
"""Bytes of a file, and characters of its text; a larger one is not read."""
_READERS = {".html": "trafilatura", ".htm": "trafilatura", PDF: "pypdf"}


@dataclass(frozen=True)
class Reading:
    """What came of a file."""

    title: str = ""
    passages: tuple[str, ...] = ()
    problem: str = ""
    """Why it cannot be read; empty where it was."""
    enough: float | None = None
    """It may be read if it may use more of a processor than this; 0: the problem may pass by itself. None: it stays."""


def read_each(files: Sequence[Path], seconds: float, processor: float) -> Generator[Reading, None, None]:
    """What comes of each file, in order; close the generator to stop.

    Args:
        seconds: for one file.
        processor: seconds of processor time for one file.

    Raises:
        OSError: no process can be started.
    """
    for module in {_READERS[file.suffix.lower()] for file in files if file.suffix.lower() in _READERS}:
        with contextlib.suppress(ImportError):  # each file that needs it says so
            importlib.import_module(module)  # here, where the next search finds it imported
    done = 0
    while done < len(files):
        with _process(files[done:], processor) as child:
            while done < len(files) and not child.ended:
                yield child.reading(seconds, processor)
                done += 1


class _Child:
    """A process that reads files."""

    def __init__(self, process: int, answers: Connection) -> None:
        self._process, self._answers = process, answers
        self._used = 0.0
        self.ended = False

    def reading(self, seconds: float, processor: float) -> Reading:
        """Of the next file; where there is none the process has ended."""
        try:
            if self._answers.poll(seconds):
                title, passages, problem, enough, self._used = json.loads(self._answers.recv_bytes())
                return Reading(title, tuple(passages), problem, enough)
        except (EOFError, OSError):  # OSError: within a message
            return _ended_by(self._wait(), processor)
        used = -self._used
        self.end()
        busy = used + self._used > processor / 4
        return Reading(problem=f"to read it takes more than {seconds:g} seconds", enough=processor if busy else 0.0)

    def end(self) -> None:
        """Kill it, where it has not ended."""
        if not self.ended:
            os.kill(self._process, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        _, status, usage = os.wait4(self._process, 0)
        self.ended, self._used = True, usage.ru_utime + usage.ru_stime
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def _process(files: Sequence[Path], processor: float) -> Iterator[_Child]:
    """A process that reads the files."""
    answers, given = Pipe(duplex=False)
    with answers:
        with given:
            forked = os.fork()
            if forked == 0:
                _serve(files, processor, given)
        child = _Child(forked, answers)
        try:
            yield child
        finally:
            child.end()


def _serve(files: Sequence[Path], processor: float, given: Connection) -> NoReturn:
    """The life of that process."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.closerange(3, given.fileno())
        os.closerange(given.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        for file in files:
            reading = _read(file, processor)
            outcome = (reading.title, reading.passages, reading.problem, reading.enough, _used())
            given.send_bytes(json.dumps(outcome).encode())
    finally:  # also where nobody reads any more
        os._exit(0)


def _read(file: Path, processor: float) -> Reading:
    _limit_processor(processor)
    try:
        if file.stat().st_size > LARGEST:
            raise ToolError(f"larger than {LARGEST // 1_000_000} MB")
        found = document_text(file.read_bytes(), KINDS.get(file.suffix.lower(), ""))
        if len(found["text"]) > LARGEST:
            raise ToolError(f"its text is larger than {LARGEST // 1_000_000} million characters")
        return Reading(found["title"], tuple(paragraphs(found["text"])))
    except ToolError as error:
        return Reading(problem=str(error))
    except Exception as error:  # the boundary to readers of files that may hold anything
        passing = isinstance(error, OSError | ImportError) or type(error).__name__ == "DependencyError"  # pypdf's
        return Reading(problem=f"{type(error).__name__}: {error}", enough=0.0 if passing else None)


def _used() -> float:
    """Seconds of processor time of this process."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _limit_processor(seconds: float) -> None:
    """End this process when it has used so much more of a processor."""
    import resource

    limit = math.ceil(_used() + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _ended_by(status: int, processor: float) -> Reading:
    """Of a file whose reading ended the process."""
    if status == -signal.SIGXCPU:
        return Reading(problem=f"to read it takes more than {processor:g} seconds of a processor", enough=processor)
    how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    outside = -status in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what reads a file does not send these
    return Reading(problem=f"to read it ended the process ({how})", enough=0.0 if outside else None)
