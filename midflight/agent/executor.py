"""The executor: turns an action into a validated tool call, runs it, and gives back a typed result.

Invariant: an unknown tool, bad arguments, a tool's error or its timeout is a `ToolResult` the planner reads next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from midflight.agent.prompts import fill, template
from midflight.agent.types import Action, ErrorKind, Generation, ToolCall, ToolResult
from midflight.engines.base import Engine, GenerateRequest, Message, Sampling
from midflight.tools.base import Tool, Toolset


@dataclass(frozen=True)
class Execution:
    """What became of an action: the call (None when none could be made), its result, the executor's own generation."""

    call: ToolCall | None
    result: ToolResult
    generation: Generation | None = None


class Executor(Protocol):
    """Runs one action."""

    async def execute(self, action: Action, toolset: Toolset, seconds: float, seed: int | None) -> Execution:
        """Raises EngineError, PromptTooLong or InfrastructureError; the agent's own mistakes are results."""
        ...


@dataclass(frozen=True)
class DirectExecutor:
    """Passes the planner's context as the single argument of the tool."""

    async def execute(self, action: Action, toolset: Toolset, seconds: float, seed: int | None) -> Execution:
        tool = toolset.get(action.tool)
        if tool is None:
            return unknown_tool(action, toolset)
        properties = tool.parameters.get("properties", {})
        required = tool.parameters.get("required", list(properties))
        if len(required) != 1:
            found = f"{tool.name} takes {len(required)} arguments; a direct executor passes exactly one"
            return Execution(None, ToolResult(found, ErrorKind.INVALID_ARGUMENTS))
        name = required[0]
        value: object = action.context
        if properties.get(name, {}).get("type") in ("number", "integer"):
            try:
                value = json.loads(action.context)
            except json.JSONDecodeError:
                value = action.context  # the schema then says what was expected
        return await call_tool(tool, toolset, {name: value}, seconds, None)


@dataclass(frozen=True)
class LLMExecutor:
    """A language model that writes the call's arguments as JSON against the tool's schema."""

    engine: Engine
    sampling: Sampling = Sampling(temperature=0.0)
    grammar: bool = True

    async def execute(self, action: Action, toolset: Toolset, seconds: float, seed: int | None) -> Execution:
        tool = toolset.get(action.tool)
        if tool is None:
            return unknown_tool(action, toolset)
        schema = json.dumps(tool.parameters)
        system = fill(template("executor"), tool=tool.name, description=tool.description, schema=schema)
        asked = f"Sub-goal: {action.sub_goal}\n" if action.sub_goal else ""
        generation = await self.engine.generate(
            GenerateRequest(
                messages=(Message("system", (system,)), Message("user", (f"{asked}Context: {action.context}\nJSON:",))),
                sampling=replace(self.sampling, seed=seed),
                grammar=f"start: %json {schema}\n" if self.grammar else None,
            )
        )
        try:
            arguments = json.loads(generation.text)
        except json.JSONDecodeError as error:
            problem = f"the arguments are not JSON ({error.msg} at character {error.pos})"
            return Execution(None, ToolResult(problem, ErrorKind.INVALID_ARGUMENTS), generation)
        return await call_tool(tool, toolset, arguments, seconds, generation)


def unknown_tool(action: Action, toolset: Toolset) -> Execution:
    """The result of an action that names no tool."""
    names = ", ".join(toolset.names)
    return Execution(None, ToolResult(f"no tool named {action.tool!r}; tools: {names}", ErrorKind.UNKNOWN_TOOL))


async def call_tool(
    tool: Tool, toolset: Toolset, arguments: Mapping[str, Any], seconds: float, generation: Generation | None
) -> Execution:
    """Validate `arguments` and call `tool` with them."""
    problem = toolset.validate(tool.name, arguments)
    if problem is not None:
        return Execution(None, ToolResult(problem, ErrorKind.INVALID_ARGUMENTS), generation)
    return Execution(ToolCall(tool.name, dict(arguments)), await tool.call(arguments, seconds), generation)
