"""A task is a question with a checkable answer; a task family draws them by seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One question. `checker` names the reward function; `checker_options` are its keyword arguments.

    `kind` and `level` group results in a report; the planner never sees either, nor the answer.
    """

    id: str
    question: str
    answer: str
    checker: str = "exact"
    checker_options: dict[str, Any] = field(default_factory=dict)
    kind: str = "task"
    level: int = 1
