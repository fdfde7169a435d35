"""The verifier judges each result, and says whether the memory suffices to answer.

Invariant: only the exact field `Verdict: stop` stops a run; the word anywhere else does not, and a text that is not in
the format means continue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Protocol

from midflight.agent.memory import Memory, render_turn
from midflight.agent.prompting import query_part, request_seed, template
from midflight.agent.types import Action, Query, Verdict
from midflight.engines.base import Engine, GenerateRequest, Generation, Message, Sampling, structure_of
from midflight.tools.base import ToolResult

__all__ = ["LLMVerifier", "RuleVerifier", "VERIFIER_GRAMMAR", "Verification", "Verifier"]

VERIFIER_GRAMMAR = """start: "Verdict: " ("stop" | "continue") "\\nReason: " REASON "\\n"
REASON: /[^ \\t\\r\\n][^\\r\\n]{0,199}/
"""
_VERDICT = re.compile(r"Verdict: (?P<verdict>stop|continue)\nReason: (?P<reason>\S[^\n]*)\n?")
UNREADABLE = "the verifier's answer was unreadable"


@dataclass(frozen=True)
class Verification:
    """A verdict and the generation it was read from, if any."""

    verdict: Verdict
    generation: Generation | None = None


class Verifier(Protocol):
    """Judges the latest turn, which is not in memory yet."""

    async def verify(
        self, query: Query, action: Action, result: ToolResult, memory: Memory, analysis: str = ""
    ) -> Verification:
        """The verdict on turn `memory.next_index`.

        Raises:
            PromptTooLong: the prompt exceeds the engine's context or the memory its budget.
            EngineError: the engine failed.
        """
        ...


@dataclass(frozen=True)
class RuleVerifier:
    """Never stops and adds no reason: an error already says what went wrong."""

    async def verify(
        self, query: Query, action: Action, result: ToolResult, memory: Memory, analysis: str = ""
    ) -> Verification:
        """Continue."""
        return Verification(Verdict(stop=False))


@dataclass(frozen=True)
class LLMVerifier:
    """A language model as verifier: `Verdict: stop` or `Verdict: continue`, then `Reason: ` and one line."""

    engine: Engine
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    grammar: bool = True

    async def verify(
        self, query: Query, action: Action, result: ToolResult, memory: Memory, analysis: str = ""
    ) -> Verification:
        """See `Verifier.verify`."""
        sections = template("verifier")
        latest = render_turn(
            memory.next_index,
            action,
            None,
            result,
            None,
            style="full",
            result_tokens=memory.budget_tokens // 2,
            count_tokens=self.engine.count_tokens,
        )
        turns = memory.parts(memory.budget_tokens, self.engine.count_tokens, "full")
        messages = (
            Message("system", (sections["system"].substitute() + "\n",)),
            Message("user", (query_part(query.text, analysis), *turns, latest, sections["tail"].substitute())),
        )
        sampling = replace(self.sampling, seed=request_seed(query.seed, "verifier", memory.next_index))
        grammar = VERIFIER_GRAMMAR if self.grammar and structure_of(self.engine) == "grammar" else None
        generation = await self.engine.generate(GenerateRequest(messages, sampling, grammar))
        match = _VERDICT.fullmatch(generation.text)
        if match is None:
            return Verification(Verdict(stop=False, reason=UNREADABLE), generation)
        return Verification(Verdict(stop=match["verdict"] == "stop", reason=match["reason"].strip()), generation)
