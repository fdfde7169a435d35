"""Rewards: one checker a file, each a pure function of the answer, the expected answer and named options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from midflight.rewards.exact import exact
from midflight.rewards.numeric import numeric

if TYPE_CHECKING:
    from midflight.tasks.base import Task

__all__ = ["CHECKERS", "Checker", "checker_fault", "exact", "numeric", "score"]

Checker = Callable[..., float]
"""`checker(answer, expected, **options)` gives 0.0 or 1.0."""

CHECKERS: Mapping[str, Checker] = MappingProxyType({"exact": exact, "numeric": numeric})
"""By the name a task gives."""


def checker_fault(name: str, options: Mapping[str, Any]) -> str | None:
    """Why a task cannot use this checker with these options, on one line; None when it can."""
    if name not in CHECKERS:
        return f"unknown checker {name!r}; valid: {', '.join(CHECKERS)}"
    hints = get_type_hints(CHECKERS[name])
    valid = [p.name for p in inspect.signature(CHECKERS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in valid:
            return f"checker {name!r} has no option {option!r}; valid: {', '.join(valid)}"
        value = options[option]
        if isinstance(value, int | float) and not 0 <= value <= sys.float_info.max:
            return f"checker {name!r}: {option} must be a finite number of at least 0"
        try:
            TypeAdapter(hints[option]).validate_python(value, strict=True)
        except ValidationError as error:
            return f"checker {name!r}: {option}: {error.errors()[0]['msg']}"
    return None


def score(task: Task, answer: str | None) -> float:
    """The reward of an answer, 0.0 or 1.0. No answer, or an empty one, is 0.0.

    Raises:
        ValueError: the task names an unknown checker or option, or its own answer cannot be checked.
    """
    fault = checker_fault(task.checker, task.checker_options)
    if fault is not None:
        raise ValueError(f"task {task.id!r}: {fault}")
    if answer is None or not answer.strip():
        return 0.0
    return CHECKERS[task.checker](answer, task.answer, **task.checker_options)
