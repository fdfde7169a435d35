"""`generalist`: one call to a language model (the base generator of AgentFlow, arXiv 2510.05592)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from midflight.tools.base import Tool
from midflight.tools.function import tool
from midflight.tools.language.asking import EngineOptions, ask
from midflight.tools.options import ToolContext

SYSTEM = "You answer one question or do one small task for an assistant. Answer directly and briefly."


def generalist(options: EngineOptions, context: ToolContext) -> Tool:
    """The tool within its options."""

    async def generalist(
        query: Annotated[str, Field(min_length=1, max_length=8000, description="question or task, with all it needs")],
    ) -> str:
        """ask a language model: general knowledge, reasoning, writing; it sees nothing but the query"""
        return await ask(context.engine(options.engine), SYSTEM, query, options.max_tokens)

    return tool(generalist)
