"""Requests to frames and answers to results: what the agent makes of what came out of a session.

An answer is partly what a program wrote. So nothing in it is taken for more than text, numbers and bytes.
"""

from __future__ import annotations

import errno
from typing import Any

from midflight.sandbox.base import (
    Command,
    File,
    Limits,
    ListFiles,
    Outcome,
    Python,
    ReadFile,
    Request,
    SandboxResult,
    WriteFile,
    printable,
)
from midflight.sandbox.inside import frames

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def request_frame(request: Request) -> dict[str, Any]:
    """What the holder is sent."""
    match request:
        case Python(code, stdin, keep_state, figures):
            kind = "state" if keep_state else "python"
            return {"kind": kind, "code": code, "figures": figures, "stdin": frames.to_text(_encoded(stdin))}
        case Command(words, stdin):
            return {"kind": "command", "command": list(words), "stdin": frames.to_text(_encoded(stdin))}
        case WriteFile(path, data):
            return {"kind": "write", "path": path, "data": frames.to_text(data)}
        case ReadFile(path, most):
            return {"kind": "read", "path": path, "most": most}
        case ListFiles(path):
            return {"kind": "list", "path": path}


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def lost(problem: str) -> SandboxResult:
    """The result of a request whose session is gone."""
    return SandboxResult(Outcome.KILLED, problem=problem)


def result(request: Request, answer: dict[str, Any], limits: Limits) -> SandboxResult:
    """The result of a holder's answer."""
    reply = _reply(frames.to_bytes(answer["reply"]))
    status = answer["status"]
    exception, number = reply.get("exception"), reply.get("number")
    exception = exception if isinstance(exception, str) else ""
    if answer["cause"] == "exit" and status == 0 and isinstance(request, Python) and request.keep_state:
        code = reply.get("code")
        status = code if isinstance(code, int) else 1
    said = reply.get("problem")
    if isinstance(said, str):
        status, problem = 1, printable(said.encode("utf-8", "replace"))
    else:
        problem = ""
    outcome = _outcome(answer["cause"], status, exception, number)
    return SandboxResult(
        outcome,
        out=printable(frames.to_bytes(answer["out"])),
        err=printable(frames.to_bytes(answer["err"])),
        exit_code=status if isinstance(status, int) and status >= 0 else None,
        exception="" if outcome is Outcome.OK else printable(exception.encode("utf-8", "replace")),
        problem=problem or _problem(outcome, status, limits),
        seconds=answer["seconds"],
        data=_data(reply),
        files=_files(reply),
        more_files=reply.get("more") is True,
        state_kept=answer["state_kept"] is True,
    )


def _reply(data: bytes) -> dict[str, Any]:
    """The first frame of a reply; an empty one when there is none, as of a program that was killed, or forged it."""
    try:
        return frames.unpack(data[frames.HEAD :][: frames.length(data[: frames.HEAD])])
    except (ValueError, RecursionError):
        return {}


def _outcome(cause: str, status: int | None, exception: str, number: object) -> Outcome:
    match cause:
        case "wall":
            return Outcome.WALL_LIMIT
        case "cpu":
            return Outcome.CPU_LIMIT
        case "memory":
            return Outcome.MEMORY_LIMIT
        case "output":
            return Outcome.OUTPUT_LIMIT
    if status == 0:
        return Outcome.OK
    if status is None or status < 0:
        return Outcome.KILLED
    if exception == "MemoryError" or number == errno.ENOMEM:
        return Outcome.MEMORY_LIMIT
    if exception == "NoThread" or (exception == "BlockingIOError" and number == errno.EAGAIN):
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
            return "a file too large, too many files, or no room left in the workspace"
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
    files = reply.get("files")
    found = []
    for one in files if isinstance(files, list) else ():
        path, size, kind = (one.get(key) for key in ("path", "bytes", "kind")) if isinstance(one, dict) else (0, 0, 0)
        if isinstance(path, str) and isinstance(size, int) and isinstance(kind, str):
            found.append(File(printable(path.encode("utf-8", "surrogateescape")), size, kind))
    return tuple(found)
