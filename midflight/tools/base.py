"""What a tool is: a name, a description, a JSON schema, and a call that returns a typed result.

Invariant: whatever goes wrong in a call is a `ToolResult` with an error kind; a tool never raises into the agent.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Protocol, Self, runtime_checkable

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

from midflight.errors import InfrastructureError as InfrastructureError
from midflight.records import record
from midflight.tools.scope import Scope, ScopedTool, holds


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
    CALL_LIMIT = "call_limit"
    """The trajectory has made all the calls that it may, of this tool or together; nothing was called."""


class ToolError(Exception):
    """Raised inside a tool's function: its message becomes the TOOL_ERROR text the planner reads."""


class TransientError(InfrastructureError):
    """A failure that may be gone at the next attempt: a busy or broken server, a lost connection.

    Args:
        retry_after: seconds to wait, where the service says so.
        infrastructure: False where the planner can do something about it, such as choosing another page: when all
            retries fail the call then ends in TOOL_ERROR.
        so_far: what can be answered all the same: when all retries fail it is the result, which no cache keeps.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        infrastructure: bool = True,
        so_far: str | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after, self.infrastructure, self.so_far = retry_after, infrastructure, so_far

    def ending(self) -> ToolResult | None:
        """What the call ends in when nobody tries it again; None where this is to be raised."""
        if self.so_far is not None:
            return ToolResult(self.so_far)
        return None if self.infrastructure else ToolResult(str(self), ErrorKind.TOOL_ERROR)


@record
class ToolCall:
    """A validated call: `arguments` satisfy the tool's schema."""

    tool: str
    arguments: Mapping[str, Any]


@record
class ToolResult:
    """What a call gave. `text` is data, for the planner to read; `error` is None when the call succeeded."""

    text: str
    error: ErrorKind | None = None
    whole: str | None = None
    """The result before it was cut to the tool's `result_characters`; None where `text` is all of it."""


FINISH = "finish"
"""Name of the built-in tool that ends a trajectory."""


class Tool(Protocol):
    """Something the planner can choose. Name, description and parameters stay as they are."""

    @property
    def name(self) -> str:
        """What the planner writes to choose it: letters, digits, `_`, `-` or `.`."""

    @property
    def description(self) -> str:
        """One short paragraph for the planner."""

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments; its type is `object`."""

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """Run with validated arguments for at most `seconds` of wall clock, waiting for its turn aside.

        Raises:
            InfrastructureError: a service the tool depends on is down.
            BudgetSpent: it asks a language model, and the run's budget is spent.
            asyncio.CancelledError: the caller cancelled. Nothing else is ever raised.
        """


@runtime_checkable
class ClosableTool(Protocol):
    """A tool that holds something for as long as the toolset is used."""

    def close(self) -> None:
        """Let go of it; safe to call twice."""


async def call_tool(tool: Tool, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
    """`tool.call`, as the agent makes it: a failure that the planner can do something about is a result.

    Limits around a tool try such a one again first; a tool may have none. Raises as `Tool.call` does.
    """
    try:
        return await tool.call(arguments, seconds)
    except TransientError as error:
        result = error.ending()
        if result is None:
            raise
        return result


class _Finish:
    """The built-in `finish` tool: choosing it ends the loop, so a call does nothing."""

    name = FINISH
    description = "stop: the question can be answered from what is known"

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {}, "additionalProperties": False}

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        return ToolResult("")


def argument_schema(tool: Tool, name: str) -> Mapping[str, Any]:
    """The schema of one argument; an empty one where the tool's says nothing of it, or only `true`."""
    found = tool.parameters.get("properties", {}).get(name)
    return found if isinstance(found, (dict, Mapping)) else {}  # a dict at once: to ask an abstract class takes 1 us


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Toolset:
    """Tools in a fixed order; `finish` always comes last.

    Raises:
        ValueError: two tools of one name, a bad name, a tool called `finish`, or parameters that are not a JSON schema.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        self._validators: dict[str, Draft202012Validator] = {}
        self._plain: dict[str, Mapping[str, type] | None] = {}
        for tool in (*tools, _Finish()):
            if not _NAME.fullmatch(tool.name):
                raise ValueError(f"bad tool name {tool.name!r}: use 1 to 64 letters, digits, '_', '-' or '.'")
            if tool.name in self._tools:
                hint = "it is built in, leave it out" if tool.name == FINISH else "rename one of them"
                raise ValueError(f"two tools are named {tool.name!r}: {hint}")
            try:
                Draft202012Validator.check_schema(tool.parameters)
            except SchemaError as error:
                raise ValueError(f"parameters of tool {tool.name!r} are not a JSON schema: {error.message}") from error
            except RecursionError:
                raise ValueError(f"parameters of tool {tool.name!r} are nested too deeply") from None
            self._tools[tool.name] = tool
            # The empty registry keeps a `$ref` in a foreign tool's schema from being fetched over the network.
            self._validators[tool.name] = Draft202012Validator(tool.parameters, registry=EMPTY_REGISTRY)
            self._plain[tool.name] = _plain_types(tool.parameters)
        self._holds = any(isinstance(tool, ScopedTool) for tool in self)
        self.texts: dict[Hashable, str] = {}
        """What modules wrote of names, descriptions and parameters, by who and how: once, and all scopes share it."""

    @property
    def names(self) -> tuple[str, ...]:
        """In order, `finish` last."""
        return tuple(self._tools)

    def get(self, name: str) -> Tool | None:
        """The tool of that exact name, or None."""
        return self._tools.get(name)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def close(self) -> None:
        """End what tools hold beyond a trajectory, such as servers that they started."""
        for tool in self:
            if isinstance(tool, ClosableTool):
                tool.close()

    def holds(self, name: str) -> bool:
        """Whether calls of tool `name` leave something that a trajectory's later calls go on from."""
        tool = self._tools.get(name)
        return tool is not None and holds(tool)

    def scoped(self, scope: Scope) -> Self:
        """The toolset of one trajectory: each tool that holds something for it gets `scope`."""
        if not self._holds:
            return self
        own = copy.copy(self)
        own._tools = {
            name: tool.scoped(scope) if isinstance(tool, ScopedTool) else tool for name, tool in self._tools.items()
        }
        return own

    def validate(self, name: str, arguments: object) -> str | None:
        """None when `arguments` satisfy the schema of tool `name`; otherwise the reason, on one line."""
        validator = self._validators.get(name)
        if validator is None:
            return f"no tool named {name!r}; valid names: {', '.join(self.names)}"
        plain = self._plain[name]
        if plain is not None and type(arguments) is dict and plain.keys() == arguments.keys():
            for key, value in arguments.items():
                if type(value) is not plain[key]:
                    break
            else:
                return None  # what most calls are; all else is for the validator to judge
        try:
            error = best_match(validator.iter_errors(arguments))
        except Unresolvable as unresolvable:
            return one_line(f"the schema of {name} refers to something outside itself: {unresolvable}")
        except RecursionError:  # arguments that are deep under a schema that is recursive, or a reference to itself
            return f"cannot be checked: the arguments, or the schema of {name}, are nested too deeply"
        except OverflowError:  # multipleOf of a fraction
            return f"cannot be checked: a number is too large for the schema of {name}"
        if error is None:
            return None
        where = ".".join(str(part) for part in error.absolute_path)
        return one_line(f"{where}: {error.message}" if where else error.message)


_TYPES = {"string": str, "integer": int, "boolean": bool}


def _plain_types(schema: Mapping[str, Any]) -> Mapping[str, type] | None:
    """The type of each property, where a schema asks for nothing else: an object of all these is surely valid."""
    known = {"type", "properties", "required", "additionalProperties", "title", "description"}
    if not schema.keys() <= known or schema.get("type") != "object":
        return None
    types = {}
    for name, one in schema.get("properties", {}).items():
        if not isinstance(one, dict) or not one.keys() <= {"type", "title", "description", "default"}:
            return None
        if not isinstance(one.get("type"), str) or one["type"] not in _TYPES:
            return None
        types[name] = _TYPES[one["type"]]
    return types if set(schema.get("required", ())) <= types.keys() else None


def one_line(text: str, limit: int = 240) -> str:
    """`text` with every run of whitespace as one space, cut to `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
