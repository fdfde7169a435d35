"""A scope makes a thing once, shares it by key and closes it with the trajectory; nothing reaches the next."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from midflight.agent import AgentFlow, DirectExecutor, LastResultGenerator, LLMPlanner, Query, RuleVerifier
from midflight.engines.scripted import ScriptedEngine
from midflight.tools import Scope, Tool, ToolResult, Toolset, tool

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Notebook:
    """Adds a line to its trajectory's notes and reads them all."""

    name = "notebook"
    description = "notes"
    parameters = PARAMETERS

    def __init__(self, log: list[str], scope: Scope | None = None) -> None:
        self.log, self.scope = log, scope

    def scoped(self, scope: Scope) -> Tool:
        return Notebook(self.log, scope)

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        assert self.scope is not None
        lines = await self.scope.get("notes", lambda: notes(self.log))
        lines.append(arguments["text"])
        return ToolResult("|".join(lines))


@asynccontextmanager
async def notes(log: list[str]) -> AsyncIterator[list[str]]:
    log.append("open")
    yield []
    log.append("closed")


@pytest.mark.asyncio
async def test_a_thing_is_made_once_and_closed_last_made_first() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def thing(name: str) -> AsyncIterator[str]:
        log.append(f"open {name}")
        yield name
        log.append(f"close {name}")

    async with Scope() as scope:
        assert [await scope.get(key, lambda key=key: thing(key)) for key in "aba"] == ["a", "b", "a"]  # type: ignore[misc]
        assert log == ["open a", "open b"]
    assert log == ["open a", "open b", "close b", "close a"]


@pytest.mark.asyncio
async def test_what_cannot_be_made_is_tried_again() -> None:
    tries: list[int] = []

    @asynccontextmanager
    async def second_time() -> AsyncIterator[str]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        yield "made"

    async with Scope() as scope:
        with pytest.raises(OSError, match="not yet"):
            await scope.get("key", second_time)
        assert await scope.get("key", second_time) == "made"


@pytest.mark.asyncio
async def test_a_trajectory_keeps_its_own_and_the_next_starts_empty() -> None:
    log: list[str] = []
    answers = ["notebook: one", "notebook: two", "finish"] * 2
    flow = AgentFlow(
        LLMPlanner(ScriptedEngine(answers), format="compact", grammar=False),
        DirectExecutor(),
        RuleVerifier(),
        LastResultGenerator(),
        Toolset([Notebook(log)]),
    )
    for _ in range(2):
        trajectory = await flow.run(Query("?"))
        assert [turn.result.text for turn in trajectory.turns] == ["one", "one|two", ""]
    assert log == ["open", "closed", "open", "closed"]


def test_a_toolset_without_such_tools_is_its_own_scoped_one() -> None:
    @tool
    def echo(text: str) -> str:
        """Say it again."""
        return text

    toolset = Toolset([echo])
    assert toolset.scoped(Scope()) is toolset
    mixed = Toolset([echo, Notebook([])])
    scoped = mixed.scoped(Scope())
    assert scoped.names == mixed.names
    assert scoped.get("echo") is echo
    assert scoped.get("notebook") is not mixed.get("notebook")
    assert scoped.validate("notebook", {"text": 1}) == "text: 1 is not of type 'string'"
