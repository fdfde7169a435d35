"""Requests to frames and answers to results: what the agent makes of what came out of a session.

An answer is partly what a program wrote. So nothing in it is taken for more than text, numbers and bytes.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from typing import Any

from midflight.sandbox.base import (
    MOST_READ,
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
    TestOutcome,
    WriteFile,
    printable,
    spelt_out,
    spelt_out_name,
)
from midflight.sandbox.bubblewrap.inside import frames, testing

PROGRAM_REPLY = 2**16
"""Bytes that a program's process says of it, beside what it writes; more is forged."""
_FULL = frozenset({"ENOSPC", "EDQUOT", "EFBIG"})
_ENDED = frozenset({"exception", "number"})
_SAID: Mapping[type, frozenset[str]] = {
    Python: _ENDED | {"code", "files"},
    Command: frozenset(),
    RunTests: frozenset({"tests", "counts"}),
    WriteFile: _ENDED | {"problem"},
    ReadFile: _ENDED | {"problem", "data"},
    ListFiles: _ENDED | {"problem", "files", "more"},
}
"""What there is to say of each kind of request."""


def request_frame(request: Request) -> dict[str, Any]:
    """What the holder is sent."""
    match request:
        case Python(code, stdin, keep_state, figures):
            kind = "state" if keep_state else "python"
            return {"kind": kind, "code": code, "figures": figures, "stdin": frames.to_text(encoded(stdin))}
        case Command(words, stdin):
            return {"kind": "command", "command": list(words), "stdin": frames.to_text(encoded(stdin))}
        case RunTests(paths):
            return {"kind": "tests", "paths": list(paths)}
        case WriteFile(path, data, start, executable):
            text = frames.to_text(data)
            return {"kind": "write", "path": path, "data": text, "start": start, "executable": executable}
        case ReadFile(path, most, start):
            return {"kind": "read", "path": path, "most": min(most, MOST_READ), "start": start}
        case ListFiles(path, skip):
            return {"kind": "list", "path": path, "skip": skip}


def encoded(text: str) -> bytes:
    """What a program reads that text from: any text, lone surrogates too, which its `input()` gives as they were."""
    return text.encode("utf-8", "surrogatepass")


def lost(problem: str) -> SandboxResult:
    """The result of a request whose session is gone."""
    return SandboxResult(Outcome.KILLED, problem=problem)


def result(request: Request, answer: dict[str, Any], limits: Limits) -> SandboxResult:
    """The result of a holder's answer."""
    said_in_all = frames.to_bytes(answer["reply"])
    reply = _reply(request, said_in_all)
    status = answer["status"]
    exception, number = reply.get("exception"), reply.get("number")
    exception = exception if isinstance(exception, str) else ""
    number = number if isinstance(number, str) else ""
    kept = isinstance(request, Python) and request.keep_state
    if answer["cause"] == "exit" and status == 0 and kept and said_in_all:  # else it ended the interpreter, with 0
        code = reply.get("code")
        status = code if isinstance(code, int) and 0 <= code < 256 else 1
    said = reply.get("problem")
    if isinstance(said, str):
        status, problem = 1, spelt_out(said)
    else:
        problem = ""
    outcome = _outcome(answer["cause"], status, exception, number)
    return SandboxResult(
        outcome,
        out=printable(frames.to_bytes(answer["out"])),
        err=printable(frames.to_bytes(answer["err"])),
        exit_code=status if isinstance(status, int) and status >= 0 else None,
        exception="" if outcome is Outcome.OK else spelt_out(exception),
        problem=problem or _problem(outcome, status, limits),
        seconds=answer["seconds"],
        data=_data(reply),
        files=_files(reply),
        tests=_tests(reply),
        test_counts=_counts(reply),
        more_files=reply.get("more") is True,
        state_kept=answer["state_kept"] is True,
    )


def _reply(request: Request, data: bytes) -> dict[str, Any]:
    """The first frame of a reply; an empty one when there is none, as of a program that was killed, or forged it."""
    if isinstance(request, Python) and len(data) > PROGRAM_REPLY:
        return {}
    try:
        said = frames.unpack(data[frames.HEAD :][: frames.length(data[: frames.HEAD])])
    except (ValueError, RecursionError):
        return {}
    return {key: value for key, value in said.items() if key in _SAID[type(request)]}


def _outcome(cause: str, status: int | None, exception: str, number: str) -> Outcome:
    match cause:
        case "wall":
            return Outcome.WALL_LIMIT
        case "cpu":
            return Outcome.CPU_LIMIT
        case "memory":
            return Outcome.MEMORY_LIMIT
        case "output":
            return Outcome.OUTPUT_LIMIT
        case "disk":
            return Outcome.FILE_LIMIT
    if status == 0:
        return Outcome.OK
    if status == -signal.SIGXFSZ:
        return Outcome.FILE_LIMIT
    if status == -signal.SIGXCPU:
        return Outcome.CPU_LIMIT
    if status is None or status < 0:
        return Outcome.KILLED
    if exception == "MemoryError" or number == "ENOMEM":
        return Outcome.MEMORY_LIMIT
    if exception == "NoThread" or (exception == "BlockingIOError" and number == "EAGAIN"):
        return Outcome.PROCESS_LIMIT
    return Outcome.FILE_LIMIT if number in _FULL else Outcome.ERROR


def _problem(outcome: Outcome, status: int | None, limits: Limits) -> str:
    match outcome:
        case Outcome.OK:
            return ""
        case Outcome.WALL_LIMIT:
            return f"killed after {limits.wall_seconds:g} s"
        case Outcome.CPU_LIMIT:
            return f"killed after {limits.cpu_seconds:g} s of processor time"
        case Outcome.MEMORY_LIMIT:
            return f"more than {limits.memory_bytes / 2**20:.0f} MB of memory"
        case Outcome.OUTPUT_LIMIT:
            return f"killed after {limits.output_bytes} bytes of output"
        case Outcome.PROCESS_LIMIT:
            return f"more than {limits.processes} processes and threads"
        case Outcome.FILE_LIMIT:
            return "a file too large, too many files, too deep folders, or no room left in the workspace"
        case Outcome.KILLED:
            return f"ended by signal {-status}" if status is not None else "killed"
        case Outcome.ERROR:
            return f"exit code {status}"


def _data(reply: dict[str, Any]) -> bytes:
    data = reply.get("data")
    try:
        return frames.to_bytes(data) if isinstance(data, str) else b""
    except ValueError:
        return b""


def _files(reply: dict[str, Any]) -> tuple[File, ...]:
    return tuple(
        File(spelt_out_name(path), size, kind)
        for path, size, kind in _rows(reply, "files", ("path", str), ("bytes", int), ("kind", str))
    )


def _tests(reply: dict[str, Any]) -> tuple[TestOutcome, ...]:
    rows = _rows(reply, "tests", ("name", str), ("outcome", str), ("message", str))
    sizes = itertools.accumulate(sum(map(len, row)) for row in rows)
    told = [row for row, size in zip(rows, sizes, strict=True) if size <= testing.CHARACTERS]
    return tuple(
        TestOutcome(spelt_out(name), spelt_out(outcome), spelt_out(message)) for name, outcome, message in told
    )


def _counts(reply: dict[str, Any]) -> dict[str, int]:
    counts = reply.get("counts")
    pairs = counts.items() if isinstance(counts, dict) else ()
    return {spelt_out(outcome): count for outcome, count in pairs if isinstance(count, int)}


def _rows(reply: dict[str, Any], key: str, *fields: tuple[str, type]) -> list[list[Any]]:
    """The values of these fields of each object of a list; without those objects that have other types in them."""
    listed = reply.get(key)
    objects = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    rows = [[one.get(name) for name, _ in fields] for one in objects]
    return [row for row in rows if all(isinstance(value, kind) for value, (_, kind) in zip(row, fields, strict=True))]
