"""Metrics of a run: one JSON object a line, appended and flushed as each step ends.

Invariant: whatever a killed process or a full disk leaves, the complete lines are readable and the next append starts
a new line.
A number that is not finite is written as null, so that the file is JSON for every reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from midflight.errors import CannotWrite, UserError
from midflight.store.seals import to_disk


class MetricsError(UserError):
    """A line that is not the last is not JSON; the message names file and line."""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All records in order; an absent file has none, and a half-written last line is left out.

    Raises:
        MetricsError: a line before the last is not a JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line.strip() and number < len(lines):
            raise MetricsError(f"{path}, line {number}: not a JSON object; repair or remove the line")
    return records


class MetricsWriter:
    """Appends records to `path`; a context manager. Opening it removes a half-written last line."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_end(self.path)
        self._file = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record and hand it to the operating system.

        Raises:
            CannotWrite: the disk is full.
        """
        line = (json.dumps(_finite(dict(record)), allow_nan=False) + "\n").encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise CannotWrite(self.path, error) from error

    def to_disk(self) -> None:
        """Wait until what was written would survive a power cut."""
        to_disk(self.path)

    def _open(self) -> FileIO:
        """Without a buffer: closing after a failed write has nothing left to write."""
        return FileIO(self.path, "a")

    def truncate_from(self, step: int) -> int:
        """Remove the records whose `step` is >= `step`, for a resume from before it; returns how many.

        The file is replaced in one move: a kill in the middle leaves the old file or the new one.
        """
        records = read_metrics(self.path)
        kept = [record for record in records if record.get("step", -math.inf) < step]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        os.replace(temporary, self.path)
        self._file = self._open()
        return len(records) - len(kept)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _mend_end(path: Path) -> None:
    """End the file at a line's end: complete a whole last line, cut a half one."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if _parse(content[start:]) is None:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
