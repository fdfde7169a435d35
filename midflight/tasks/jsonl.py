"""Questions from a JSONL file, one object a line: {id, question, answer, checker[, checker_options, kind, level]}.

Invariant: a file loads whole or fails with one error that names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from midflight.agent.prompting import cut_middle
from midflight.errors import UserError
from midflight.rewards import checker_fault, score
from midflight.tasks.base import Task


class TaskFileError(UserError):
    """A task file is wrong; the message is one line: file, line number, what is wrong."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    question: str
    answer: str
    checker: str
    checker_options: dict[str, Any] = {}
    kind: str = "task"
    level: int = Field(default=1, ge=1)


def load_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file, in order; blank lines are skipped.

    Raises:
        TaskFileError: unreadable or empty file, bad JSON, a missing or unknown key, a value of the wrong type, an
            unknown checker or option, an answer its own checker refuses, or an id used twice.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise TaskFileError(f"{path}: cannot read: not a regular file")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TaskFileError(f"{path}: cannot read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TaskFileError(f"{path}:{line}: not UTF-8") from error
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, line_text in enumerate(text.split("\n"), start=1):
        if not line_text.strip():
            continue
        try:
            task = _parse(line_text)
        except ValueError as error:
            raise TaskFileError(f"{path}:{number}: {error}") from error
        if task.id in lines:
            raise TaskFileError(f"{path}:{number}: id {task.id!r} was used on line {lines[task.id]}")
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise TaskFileError(f"{path}: holds no task")
    return tasks


def check_tasks(tasks: Sequence[Task], name: str) -> None:
    """Refuse what `load_tasks` would refuse in a file.

    Raises:
        UserError: one line with `name`, the index and the field.
    """
    indices: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise UserError(f"{name}[{index}]: not a Task but {type(task).__name__}")
        try:
            _checked(_row(task))
        except ValueError as error:
            raise UserError(f"{name}[{index}]: {error}") from None
        if task.id in indices:
            raise UserError(f"{name}[{index}]: id {task.id!r} was used by {name}[{indices[task.id]}]")
        indices[task.id] = index


def to_jsonl(tasks: Sequence[Task]) -> str:
    """The text of a file from which `load_tasks` gives these tasks, which `check_tasks` lets pass."""
    return "".join(json.dumps(_row(task), default=list) + "\n" for task in tasks)


def _row(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in _Row.model_fields}


def _parse(line: str) -> Task:
    """One line as a task. Raises ValueError with the reason."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return _checked(row)


def _checked(row: dict[str, Any]) -> Task:
    """A row as a task. Raises ValueError with the reason."""
    try:
        parsed = _Row.model_validate(row)
    except ValidationError as error:
        raise ValueError(_reason(error)) from None
    for key in ("id", "question", "answer"):
        if not getattr(parsed, key).strip():
            raise ValueError(f"key {key!r} is blank")
    fault = checker_fault(parsed.checker, parsed.checker_options)
    if fault is not None:
        raise ValueError(fault)
    task = Task(**parsed.model_dump())
    try:
        accepted = score(task, task.answer)
    except (TypeError, ValueError) as error:
        raise ValueError(f"checker {task.checker!r}: {error}") from None
    if accepted != 1.0:
        raise ValueError(f"checker {task.checker!r} refuses the task's own answer {task.answer!r}")
    return task


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"key {key!r} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; valid: {', '.join(_Row.model_fields)}"
    return f"key {key!r}: {first['msg']}, not {cut_middle(repr(first['input']), 80)}"
