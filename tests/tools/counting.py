"""A tool that counts its calls, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midflight.tools import (
    LimitedTool,
    ToolOptions,
    ToolResult,
)


class Counting:
    """Answers with what `answer` gives, and counts."""

    name = "counting"
    description = "counts"
    cache_state = None
    parameters: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def __init__(self, answer: Callable[[int], Any]) -> None:
        self.answer, self.calls, self.seconds = answer, 0, 0.0

    async def call(self, arguments: Any, seconds: float) -> ToolResult:
        self.calls += 1
        self.seconds = seconds
        value = self.answer(self.calls)
        if isinstance(value, Exception):
            raise value
        return value if isinstance(value, ToolResult) else ToolResult(f"{arguments['text']} {value}")


def limited(inner: Counting, folder: Path = Path("/nowhere"), **options: Any) -> LimitedTool:
    return LimitedTool(inner, ToolOptions(**options), folder)


def call(made: Any, text: str = "a", seconds: float = 5.0) -> ToolResult:
    return asyncio.run(made.call({"text": text}, seconds))
