"""Keys that a tool says, taken out before anything else sees them: caches, memory, prompts, the store, the user.

Invariant: it is the innermost layer around a tool, under its limits, so that nothing was cut or kept before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from midflight.redacting import redact_all, redact_cut
from midflight.tools.base import ClosableTool, Tool, ToolResult, TransientError
from midflight.tools.scope import Scope, ScopedTool, ToolAround


class HidingTool(ToolAround):
    """`tool` without `keys` in its description, parameters, results and errors."""

    def __init__(self, tool: Tool, keys: Sequence[str]) -> None:
        super().__init__(tool)
        self._keys = keys
        self.description = self._hidden(tool.description)
        self.parameters: dict[str, Any] = redact_all(tool.parameters, keys)

    def scoped(self, scope: Scope) -> Tool:
        """See `ScopedTool`."""
        return HidingTool(self.tool.scoped(scope), self._keys) if isinstance(self.tool, ScopedTool) else self

    def close(self) -> None:
        """Close the tool inside, where it holds something."""
        if isinstance(self.tool, ClosableTool):
            self.tool.close()

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """See `Tool.call`."""
        try:
            result = await self.tool.call(arguments, seconds)
        except Exception as error:
            error.args = tuple(self._hidden(one) if isinstance(one, str) else one for one in error.args)
            if isinstance(error, TransientError) and error.so_far is not None:
                error.so_far = self._hidden(error.so_far)
            raise
        whole = None if result.whole is None else self._hidden(result.whole)
        return replace(result, text=self._hidden(result.text), whole=whole)

    def _hidden(self, text: str) -> str:
        return redact_cut(text, self._keys)
