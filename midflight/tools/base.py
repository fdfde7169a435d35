"""What a tool is: a name, a description, a JSON schema, and a call that returns a typed result.

Invariant: whatever goes wrong in a call is a `ToolResult` with an error kind; a tool never raises into the agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

FINISH = "finish"
"""Name of the built-in action that ends a trajectory; it takes no arguments."""


class ErrorKind(StrEnum):
    """The ways a turn can fail by the agent's own doing; the planner reads each of them in its memory."""

    INVALID_ACTION = "invalid_action"
    """The planner's text is not an action."""
    UNKNOWN_TOOL = "unknown_tool"
    """The action names a tool that is not in the toolset; the message lists the valid names."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments break the tool's JSON schema."""
    TOOL_ERROR = "tool_error"
    """The tool ran and failed, or found nothing."""
    TOOL_TIMEOUT = "tool_timeout"
    """The tool exceeded its time limit and was interrupted."""


class ToolError(Exception):
    """Raised inside a tool's function: its message becomes the TOOL_ERROR text the planner reads."""


class InfrastructureError(Exception):
    """Raised where a service the agent depends on is down (sandbox, search provider): not the planner's mistake."""


@dataclass(frozen=True)
class ToolCall:
    """A validated call: `arguments` satisfy the tool's schema."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What a call gave. `text` is data, for the planner to read; `error` is None when the call succeeded."""

    text: str
    error: ErrorKind | None = None


@runtime_checkable
class Tool(Protocol):
    """Something the executor can call; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """Run with validated arguments for at most `seconds`; raises InfrastructureError and CancelledError only."""
        ...


class _Finish:
    name = FINISH
    description = "Stop; the answer is ready."
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "required": []}

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        return ToolResult("")


class Toolset:
    """Tools by name, in order, with `finish` always last."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {tool.name: tool for tool in (*tools, _Finish())}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def validate(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """None when `arguments` fit the schema of `name`, else one line that says why not."""
        schema = self._tools[name].parameters
        types: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float)}
        for key in schema.get("required", ()):
            if key not in arguments:
                return f"missing argument {key!r}"
        for key, value in arguments.items():
            if key not in schema["properties"]:
                return f"unknown argument {key!r}"
            kind = schema["properties"][key].get("type", "string")
            if not isinstance(value, types.get(kind, (object,))):
                return f"argument {key!r} must be of type {kind}"
        return None
