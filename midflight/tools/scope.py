"""What one trajectory holds while it runs: a workspace, an interpreter that keeps its state, counts of calls.

Invariant: a scope is made by `AgentFlow.run` and closed with it, so nothing of one trajectory reaches the next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast, runtime_checkable

if TYPE_CHECKING:
    from midflight.tools.base import Tool

T = TypeVar("T")


class Scope:
    """Things by key, each made at its first use and closed, last made first, when the scope is left.

    `calls` are those of each tool that counts them, by name; a trajectory that goes on begins with those it has made.
    """

    def __init__(self, calls: Counter[str] | None = None) -> None:
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._stack = AsyncExitStack()
        self._made: dict[Hashable, Any] = {}
        self._making = asyncio.Lock()

    async def get(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """What `make` gave for `key`, entered at the first use. A `make` that fails is tried again at the next.

        Tools that share a thing share its key.
        """
        async with self._making:
            if key not in self._made:
                self._made[key] = await self._stack.enter_async_context(make())
            return cast(T, self._made[key])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)


@runtime_checkable
class ScopedTool(Protocol):
    """A tool that holds something for a trajectory. Its name, description and parameters do not depend on that."""

    def scoped(self, scope: Scope) -> Tool:
        """The tool to call within `scope`; cheap, since every trajectory asks for every tool."""


class ToolAround:
    """A layer around `tool`, which holds for a trajectory what that one does."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool

    @property
    def name(self) -> str:
        return self.tool.name


def holds(tool: Tool) -> bool:
    """Whether calls of `tool` may leave something in a trajectory's scope that its later calls go on from.

    Counts of calls are not meant: those of a trajectory that goes on are known.
    """
    while isinstance(tool, ToolAround):
        tool = tool.tool
    return isinstance(tool, ScopedTool)
