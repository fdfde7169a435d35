"""The executor turns an action into a tool call with valid arguments, and runs it.

Invariant: a tool is called only with arguments that satisfy its JSON schema. A wrong name or wrong arguments are
results with an error kind, which the planner reads next; they never raise and are never repaired.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from midflight.agent.prompting import cut_middle, fenced, one_line, request_seed, template
from midflight.agent.strict import parse_object
from midflight.agent.types import Action
from midflight.engines.base import Engine, GenerateRequest, Generation, Message, Sampling, structure_of
from midflight.records import record
from midflight.tools.base import ErrorKind, ToolCall, ToolResult, argument_schema, call_tool

if TYPE_CHECKING:
    from midflight.tools.base import Tool, Toolset

__all__ = ["DirectExecutor", "Execution", "Executor", "LLMExecutor"]


@record
class Execution:
    """What came of an action. `call` is None when no tool was called; `generation` is the executor's own, if any."""

    call: ToolCall | None
    result: ToolResult
    generation: Generation | None = None


def _nothing() -> None:
    pass


class Executor(Protocol):
    """Runs an action."""

    async def execute(
        self,
        action: Action,
        toolset: Toolset,
        seconds: float,
        seed: int | None = None,
        turn: int = 1,
        on_call: Callable[[], None] = _nothing,
    ) -> Execution:
        """Call `action.tool` for at most `seconds`.

        The trajectory's `seed` and the number of the `turn` seed the engine's request, if one is made. `on_call` is
        called once the arguments are there and the tool's own time begins.

        Raises:
            PromptTooLong: the prompt exceeds the engine's context.
            EngineError: the engine failed.
            InfrastructureError: a service the tool depends on is down.
            BudgetSpent: as engines and tools raise it.
        """
        ...


@dataclass(frozen=True)
class DirectExecutor:
    """Passes the planner's context as the one required argument of the tool, a string or a strictly parsed number."""

    async def execute(
        self,
        action: Action,
        toolset: Toolset,
        seconds: float,
        seed: int | None = None,
        turn: int = 1,
        on_call: Callable[[], None] = _nothing,
    ) -> Execution:
        """See `Executor.execute`; makes no engine request."""
        tool = toolset.get(action.tool)
        if tool is None:
            return _unknown_tool(action, toolset)
        required = tuple(tool.parameters.get("required", ()))
        if len(required) != 1:
            return _invalid(f"{tool.name} takes {len(required)} required arguments; only tools with one can be called")
        try:
            value = _parse_value(action.context, argument_schema(tool, required[0]).get("type", "string"))
        except ValueError as error:
            return _invalid(f"{required[0]} of {tool.name}: {error}")
        return await _validated_call(tool, toolset, {required[0]: value}, seconds, on_call)


@dataclass(frozen=True)
class LLMExecutor:
    """A language model that writes the arguments as one JSON object, held to the tool's schema where its engine can.

    `prompt` is the text of a template in place of the built-in one, here and in the other modules.
    """

    engine: Engine
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    grammar: bool = True
    prompt: str = ""

    async def execute(
        self,
        action: Action,
        toolset: Toolset,
        seconds: float,
        seed: int | None = None,
        turn: int = 1,
        on_call: Callable[[], None] = _nothing,
    ) -> Execution:
        """See `Executor.execute`."""
        tool = toolset.get(action.tool)
        if tool is None:
            return _unknown_tool(action, toolset)
        schema = json.dumps(tool.parameters, sort_keys=True)
        sections = template("executor", self.prompt)
        system = sections["system"].substitute(name=tool.name, description=one_line(tool.description), schema=schema)
        asked = f"Sub-goal: {one_line(action.sub_goal)}\nContext:\n{fenced(action.context)}\n"
        messages = (Message("system", (system + "\n",)), Message("user", (asked, sections["tail"].substitute())))
        structure = structure_of(self.engine) if self.grammar else "text"
        generation = await self.engine.generate(
            GenerateRequest(
                messages,
                self.sampling.seeded(request_seed(seed, "executor", turn)),
                grammar=f"start: %json {schema}\n" if structure == "grammar" else None,
                json_schema=schema if structure == "json" else None,
            )
        )
        try:
            arguments = parse_object(generation)
        except ValueError as error:
            wrote = cut_middle(one_line(generation.text), 200)
            said = f"the arguments of {tool.name} are not one JSON object: {error}; written was: {wrote}"
            return _invalid(said, generation)
        return await _validated_call(tool, toolset, arguments, seconds, on_call, generation)


async def _validated_call(
    tool: Tool,
    toolset: Toolset,
    arguments: Mapping[str, Any],
    seconds: float,
    on_call: Callable[[], None],
    generation: Generation | None = None,
) -> Execution:
    reason = toolset.validate(tool.name, arguments)
    if reason is not None:
        return _invalid(f"{tool.name}: {reason}", generation)
    on_call()
    return Execution(ToolCall(tool.name, arguments), await call_tool(tool, arguments, seconds), generation)


def _unknown_tool(action: Action, toolset: Toolset) -> Execution:
    text = f"there is no tool {cut_middle(action.tool, 60)!r}; valid names: {', '.join(toolset.names)}"
    return Execution(None, ToolResult(text, ErrorKind.UNKNOWN_TOOL))


def _invalid(reason: str, generation: Generation | None = None) -> Execution:
    return Execution(None, ToolResult(reason, ErrorKind.INVALID_ARGUMENTS), generation)


def _parse_value(context: str, kind: str) -> str | int | float:
    if kind == "string":
        return context
    if kind not in ("integer", "number"):
        raise ValueError(f"a {kind} cannot be written as plain text")
    try:
        value = json.loads(context, parse_constant=_no_constant)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int if kind == "integer" else (int, float)):
        raise ValueError(f"expected one {kind}, got {cut_middle(context, 60)!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite {kind}, got {cut_middle(context, 60)!r}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
