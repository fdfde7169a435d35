"""Metrics of a run: one JSON object a line, appended and flushed as each step ends.

Invariant: whatever a killed process or a full disk leaves, the complete lines are readable and the next append starts
a new line.
A number that is not finite is written as null, so that the file is JSON for every reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from midflight.errors import CannotWrite, UserError
from midflight.store.seals import to_disk


class MetricsError(UserError):
    """A line that is not the last is no record; the message names file and line."""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All records in order; an absent file has none, and a half-written last line is left out.

    Raises:
        MetricsError: a line before the last is not a record.
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
            raise MetricsError(f"{path}, line {number}: not the record of a step; repair or remove the line")
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
        line = _line(record).encode()
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

    def go_on(
        self, done: int, stored: Mapping[int, Mapping[str, Any] | None], say: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """Leave the records of the first `done` steps, for a resume behind them, and return them.

        Those that the file lost come from `stored`, where it has them; `say` gets a line of what was lost. The file is
        replaced in one move: a kill in the middle leaves the old file or the new one.
        """
        records = [record for record in read_metrics(self.path) if record.get("step", 0) <= done]
        lost = set(range(1, done + 1)) - {record.get("step") for record in records}
        back = {step: dict(record) for step in lost if (record := stored.get(step)) is not None}
        if back:
            say(f"{self.path} lacked {_steps(back)} of {done} that are done: written again from the store")
        if lost := lost - back.keys():
            say(f"{self.path} lacks {_steps(lost)} of {done} that are done, and so does the store: plots have a gap")
        records = sorted((*records, *back.values()), key=lambda record: record.get("step", 0))
        self._replace(records)
        return records

    def _replace(self, records: Sequence[Mapping[str, Any]]) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(map(_line, records))
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        os.replace(temporary, self.path)
        self._file = self._open()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
        return None
    return record if type(record.get("seconds", 0.0)) in (int, float) else None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _steps(steps: Collection[int]) -> str:
    """For people: `step 3`, `2 steps (3 to 7)`."""
    return f"{len(steps)} steps ({min(steps)} to {max(steps)})" if len(steps) > 1 else f"step {min(steps)}"


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
