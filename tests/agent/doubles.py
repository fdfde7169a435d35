"""Stand-ins for tests of the agent: small tools, and a flow on scripted engines."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from midflight.agent import (
    AgentFlow,
    DirectExecutor,
    ErrorKind,
    LastResultGenerator,
    LLMPlanner,
    RuleVerifier,
    ToolResult,
)
from midflight.engines.base import GenerateRequest, Sampling
from midflight.engines.scripted import Script, ScriptedEngine
from midflight.tools.base import Toolset
from midflight.tools.scope import Scope


@dataclass
class LookupTool:
    """Looks its single argument up in `table`; what is missing is a TOOL_ERROR, an exception in the table is raised."""

    name: str
    table: Mapping[str, str | ToolResult | Exception]
    description: str = "Look something up."
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    delay: float = 0.0
    calls: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"key": dict(self.schema)},
            "required": ["key"],
            "additionalProperties": False,
        }

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        self.calls.append(arguments)
        await asyncio.sleep(self.delay)
        value = self.table.get(str(arguments["key"]), ToolResult("not found", ErrorKind.TOOL_ERROR))
        if isinstance(value, Exception):
            raise value
        return ToolResult(value) if isinstance(value, str) else value


@dataclass
class BoxTool:
    """Holds one text for a trajectory: `put TEXT` puts it in, `see` gives it; `extra` is put behind each answer."""

    name: str = "box"
    description: str = "A box."
    extra: str = ""
    calls: list[str] = field(default_factory=list)
    scope: Scope | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def scoped(self, scope: Scope) -> Self:
        own = copy.copy(self)
        own.scope = scope
        return own

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        assert self.scope is not None
        box = await self.scope.get("box", _box)
        text = str(arguments["text"])
        self.calls.append(text)
        if text.startswith("put "):
            box[:] = [text.removeprefix("put ")]
            return ToolResult("done" + self.extra)
        return ToolResult(box[0] + self.extra) if box else ToolResult("empty", ErrorKind.TOOL_ERROR)


@asynccontextmanager
async def _box() -> AsyncIterator[list[str]]:
    yield []


@dataclass
class PairTool:
    """Needs two arguments, so a direct executor cannot call it."""

    name: str = "pair"
    description: str = "Join two words."

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "required": ["a", "b"],
        }

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        return ToolResult(f"{arguments['a']}-{arguments['b']}")


def population(**settings: Any) -> LookupTool:
    return LookupTool("population", {"Peru": "32933835", "Chad": "17179740"}, "Population of a country.", **settings)


def compact_flow(script: Script, *tools: Any, **settings: Any) -> tuple[AgentFlow, ScriptedEngine]:
    """A flow of rule modules with a scripted compact planner, and the planner's engine."""
    engine = ScriptedEngine(script)
    modules: dict[str, Any] = {
        "planner": LLMPlanner(engine, format="compact", sampling=Sampling(max_tokens=48)),
        "executor": DirectExecutor(),
        "verifier": RuleVerifier(),
        "generator": LastResultGenerator(),
        "toolset": Toolset(tools or (population(),)),
        "backoff": 0.0,
    }
    return AgentFlow(**{**modules, **settings}), engine


def prompt(request: GenerateRequest) -> str:
    """All parts of a request, joined."""
    return "".join(part for message in request.messages for part in message.parts)


def user_parts(request: GenerateRequest) -> tuple[str, ...]:
    return request.messages[-1].parts
