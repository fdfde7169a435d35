"""Query analysis: one look at the query before the first turn, shown to planner and generator."""

from __future__ import annotations

from dataclasses import dataclass, replace

from midflight.agent.memory import flat
from midflight.agent.planner import tool_list
from midflight.agent.prompts import fill, template
from midflight.agent.types import Query
from midflight.engines.base import Engine, GenerateRequest, Message, Sampling
from midflight.tools.base import Toolset

GRAMMAR = 'start: /[^\\n ][^\\n]{0,299}/ "\\n"\n'


@dataclass(frozen=True)
class Analyst:
    """A language model that says what the query asks for and which tools are likely to serve."""

    engine: Engine
    sampling: Sampling = Sampling(temperature=0.0)
    grammar: bool = True

    async def analyse(self, query: Query, toolset: Toolset, seed: int | None) -> str:
        """One line. Raises EngineError or PromptTooLong."""
        system = fill(template("analyst"), tools=tool_list(toolset))
        generation = await self.engine.generate(
            GenerateRequest(
                messages=(Message("system", (system,)), Message("user", (f"Question: {query.text}\n", "Analysis:"))),
                sampling=replace(self.sampling, seed=seed),
                grammar=GRAMMAR if self.grammar else None,
            )
        )
        return flat(generation.text)
