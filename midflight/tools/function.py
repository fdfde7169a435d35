"""`@tool` makes a tool of a typed function: its signature is the schema, its docstring the description.

Invariant: a call gives a `ToolResult` whatever the function does; only InfrastructureError, BudgetSpent and
cancellation pass.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NotRequired, overload

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from midflight.engines.base import BudgetSpent
from midflight.tools.base import ErrorKind, InfrastructureError, ToolError, ToolResult, one_line
from midflight.tools.clock import TimeLimit
from midflight.tools.text import result_text
from midflight.tools.threads import in_thread
from midflight.tools.worker import run_tool_in_worker

Function = Callable[..., Any]

_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"[A-Z]\w*:")


class FunctionTool:
    """A function as a tool; calling the object itself calls the function.

    Args:
        function: typed, with a docstring; sync or async.
        name: what the planner writes; the function's name when None.
        blocking: False promises that a sync function returns within microseconds: it runs on the event loop itself, so
            that many rollouts stay in one deterministic order, and its time limit is not enforced.
        process: True runs a sync function in a worker process that is killed at the time limit (see `worker`). It has
            to be a function of a module or file.

    Raises:
        TypeError: no docstring, a parameter without annotation, `*args`, `**kwargs` or positional-only parameters, a
            type that has no JSON schema, or a function that no other process can find.
    """

    def __init__(
        self, function: Function, *, name: str | None = None, blocking: bool = True, process: bool = False
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        self.blocking = blocking
        self.process = process
        if process and (not blocking or inspect.iscoroutinefunction(function) or not _is_of_a_module(function)):
            raise TypeError(
                f"tool {function.__name__!r}: process=True takes a blocking, sync function at the top of a module that "
                "can be imported"
            )
        self.description, described = _parse_docstring(function)
        self._adapter = TypeAdapter[dict[str, Any]](_arguments_type(function, described))
        self.parameters = _schema(self._adapter, function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function directly."""
        return self.function(*arguments, **named)

    def __repr__(self) -> str:
        return f"FunctionTool({self.name})"

    def values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """JSON arguments as the types of the function.

        Raises:
            ValidationError: they are not what the function takes.
            TypeError, ValueError: they are not JSON.
        """
        return self._adapter.validate_json(json.dumps(dict(arguments)), strict=True)

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """Run with `arguments` for at most `seconds`, waiting for a worker aside.

        An async function is cancelled at the limit, and one in a process of its own is killed. Any other sync one runs
        in a thread; at the limit the call returns TOOL_TIMEOUT but Python cannot stop the thread, which goes on unseen
        (it never delays process exit).

        Raises:
            InfrastructureError, BudgetSpent: raised by the function.
            asyncio.CancelledError: the caller cancelled.
        """
        try:
            values = self.values(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return ToolResult(one_line(f"{where}: {first['msg']}"), ErrorKind.INVALID_ARGUMENTS)
        except (TypeError, ValueError) as error:
            return ToolResult(one_line(f"arguments are not JSON: {error}"), ErrorKind.INVALID_ARGUMENTS)
        limit = TimeLimit(seconds)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self.function):
                    value = await self.function(**values)
                elif self.process:
                    value = await run_tool_in_worker(self.function, arguments)
                elif self.blocking:
                    value = await in_thread(partial(self.function, **values), f"tool-{self.name}")
                else:
                    value = self.function(**values)
                return ToolResult(result_text(value))
        except (InfrastructureError, BudgetSpent, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except ToolError as error:
            return ToolResult(str(error), ErrorKind.TOOL_ERROR)
        except TimeoutError as error:
            if limit.expired():
                return ToolResult(f"{self.name} took longer than {seconds:g} seconds", ErrorKind.TOOL_TIMEOUT)
            return _failure(error)
        except BaseException as error:  # also SystemExit and the panics of Rust extensions
            return _failure(error)


def _failure(error: BaseException) -> ToolResult:
    """Any other exception of a tool's function is text for the planner: this is the boundary."""
    return ToolResult(one_line(f"{type(error).__name__}: {error}", limit=1000), ErrorKind.TOOL_ERROR)


@overload
def tool(function: Function) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, blocking: bool = True, process: bool = False
) -> Callable[[Function], FunctionTool]: ...
def tool(
    function: Function | None = None, *, name: str | None = None, blocking: bool = True, process: bool = False
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Make a tool of a function, bare (`@tool`) or with options (`@tool(blocking=False)`).

    Returns, raises and options: see `FunctionTool`.
    """
    if function is not None:
        return FunctionTool(function, name=name, blocking=blocking, process=process)
    return lambda decorated: FunctionTool(decorated, name=name, blocking=blocking, process=process)


def _is_of_a_module(function: Function) -> bool:
    return function.__module__ != "__main__" and "." not in function.__qualname__


def _parse_docstring(function: Function) -> tuple[str, dict[str, str]]:
    """The first paragraph on one line, and the texts of a Google style Args section by parameter."""
    text = inspect.getdoc(function) or ""
    description = one_line(text.strip().split("\n\n")[0], limit=1000)
    if not description:
        raise TypeError(f"tool {function.__name__!r} needs a docstring: its first paragraph is what the planner reads")
    described: dict[str, str] = {}
    inside, current, depth = False, "", 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 0 and line.strip():
            inside = line.strip() == "Args:" or (inside and not _SECTION.match(line))
            current, depth = "", 0
            continue
        if not inside or not line.strip():
            continue
        match = _ARGUMENT.fullmatch(line.strip())
        if match and (depth == 0 or indent <= depth):
            current, depth = match[1], indent
            described[current] = match[2]
        elif current:
            described[current] = f"{described[current]} {line.strip()}".strip()
    return description, described


def _arguments_type(function: Function, described: Mapping[str, str]) -> Any:
    """A TypedDict of the parameters; those with a default may be missing, and the function fills them in itself."""
    where = f"tool {function.__name__!r}"
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"{where}: cannot resolve an annotation: {error}; define the type at module level") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{where}: parameter {parameter.name!r} must be an ordinary named one, not {parameter.kind.description}"
            )
        if parameter.name not in hints:
            raise TypeError(f"{where}: parameter {parameter.name!r} needs a type annotation")
        annotation = hints[parameter.name]
        own = any(isinstance(item, FieldInfo) and item.description for item in getattr(annotation, "__metadata__", ()))
        if parameter.name in described and not own:
            annotation = Annotated[annotation, Field(description=described[parameter.name])]
        required = parameter.default is parameter.empty
        fields[parameter.name] = annotation if required else NotRequired[annotation]
    unknown = sorted(set(described) - set(fields))
    if unknown:
        raise TypeError(f"{where}: its docstring describes {unknown[0]!r}, which is not a parameter")
    arguments = TypedDict(f"{function.__name__}_arguments", fields)  # type: ignore[misc]
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return arguments


def _schema(adapter: TypeAdapter[dict[str, Any]], function: Function) -> dict[str, Any]:
    """The JSON schema without the titles pydantic adds, with the defaults of the signature where JSON can hold them."""
    try:
        schema = adapter.json_schema()
    except PydanticUserError as error:
        raise TypeError(f"tool {function.__name__!r}: a parameter has no JSON schema: {error.message}") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    for name, parameter in inspect.signature(function).parameters.items():
        schema["properties"][name].pop("title", None)
        if isinstance(parameter.default, str | int | float | bool):
            schema["properties"][name]["default"] = parameter.default
    return schema
