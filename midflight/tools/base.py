"""What a tool is: a name, a description, a JSON schema, and a call that returns a typed result.

Invariant: whatever goes wrong in a call is a `ToolResult` with an error kind; a tool never raises into the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
