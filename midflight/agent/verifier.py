"""The verifier: says after each turn whether the loop may stop, and why.

Invariant: only the exact field `Verdict: stop` stops the loop; the word anywhere else never does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Protocol

from midflight.agent.memory import Memory, Style, render
from midflight.agent.prompts import template
from midflight.agent.types import Generation, Query, Turn, Verdict
from midflight.engines.base import Engine, GenerateRequest, Message, Sampling

GRAMMAR = 'start: "Verdict: " ("stop" | "continue") "\\nReason: " /[^\\n ][^\\n]{0,119}/ "\\n"\n'
_FORM = re.compile(r"Verdict: (stop|continue)\nReason: ([^\n]+)")
RESULT_LIMIT = 2000
"""Characters of the newest result shown to the verifier."""


@dataclass(frozen=True)
class Verification:
    """The verdict, and the verifier's own generation when a model gave it."""

    verdict: Verdict
    generation: Generation | None = None


class Verifier(Protocol):
    """Judges the newest turn. `turn` carries no verdict of its own yet; `memory` holds the turns before it."""

    async def verify(self, query: Query, turn: Turn, memory: Memory, seed: int | None) -> Verification:
        """Raises EngineError or PromptTooLong."""
        ...


@dataclass(frozen=True)
class RuleVerifier:
    """Never stops the loop and adds nothing to the error a result already states; the planner must finish itself."""

    async def verify(self, query: Query, turn: Turn, memory: Memory, seed: int | None) -> Verification:
        return Verification(Verdict(stop=False))


@dataclass(frozen=True)
class LLMVerifier:
    """A language model that judges whether the memory is sufficient."""

    engine: Engine
    style: Style = "full"
    sampling: Sampling = Sampling(temperature=0.0)
    grammar: bool = True
    memory_tokens: int = 512

    async def verify(self, query: Query, turn: Turn, memory: Memory, seed: int | None) -> Verification:
        parts = memory.parts(self.memory_tokens, self.engine.count_tokens, self.style)
        user = (f"Question: {query.text}\n", *parts, render(turn, RESULT_LIMIT, self.style), "Write the verdict.")
        generation = await self.engine.generate(
            GenerateRequest(
                messages=(Message("system", (template("verifier"),)), Message("user", user)),
                sampling=replace(self.sampling, seed=seed),
                grammar=GRAMMAR if self.grammar else None,
            )
        )
        return Verification(parse_verdict(generation.text), generation)


def parse_verdict(text: str) -> Verdict:
    """The verdict that `text` is; anything else is to continue, and says that it could not be read."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return Verdict(stop=False, reason="the verifier's answer could not be read")
    return Verdict(stop=match[1] == "stop", reason=match[2].strip())
