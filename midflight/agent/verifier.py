"""The verifier judges each result, and says whether the memory suffices to answer.

Invariant: only a whole verdict in the exact format stops a run, when it finds the memory sufficient and no
contradiction; a text that is not in the format means continue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from midflight.agent.memory import Memory, render_turn
from midflight.agent.prompting import query_part, request_seed, template
from midflight.agent.strict import object_schema, parse_fields
from midflight.agent.types import Action, Query, Verdict
from midflight.engines.base import Engine, FinishReason, GenerateRequest, Generation, Message, Sampling, structure_of
from midflight.tools.base import ToolResult

__all__ = ["LLMVerifier", "RuleVerifier", "VERIFIER_GRAMMAR", "Verification", "Verifier", "parse_verdict"]

VERIFIER_GRAMMAR = """start: RESULT MEMORY "Contradictions: " CONTRADICTIONS "\\nReason: " REASON "\\n"
RESULT: "Result: valid\\n" | "Result: invalid\\n"
MEMORY: "Memory: sufficient\\n" | "Memory: insufficient\\n"
CONTRADICTIONS: /[^ \\t\\r\\n][^\\r\\n]{0,119}/
REASON: /[^ \\t\\r\\n][^\\r\\n]{0,199}/
"""
_VERDICT = re.compile(
    r"Result: (?P<result>valid|invalid)\nMemory: (?P<memory>sufficient|insufficient)\n"
    r"Contradictions: (?P<contradictions>\S[^\n]*)\nReason: (?P<reason>\S[^\n]*)\n?"
)
_DENIAL = re.compile(r"(no|none|not|nothing|n/a)\b[^0-9]*", re.IGNORECASE)
"""What is no contradiction, and not the word asked for either: it names no turn."""
_FIELDS = {
    "result": ("valid", "invalid"),
    "memory": ("sufficient", "insufficient"),
    "contradictions": list,
    "reason": str,
}
_SCHEMA = object_schema(
    {
        "result": {"type": "string", "enum": ["valid", "invalid"]},
        "memory": {"type": "string", "enum": ["sufficient", "insufficient"]},
        "contradictions": {"type": "array", "items": {"type": "string"}},
        "reason": {"type": "string"},
    }
)
UNREADABLE = "the verifier's answer was unreadable"


@dataclass(frozen=True)
class Verification:
    """A verdict and the generation it was read from, if any."""

    verdict: Verdict
    generation: Generation | None = None


_CONTINUE = Verification(Verdict(stop=False))


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
        return _CONTINUE


@dataclass(frozen=True)
class LLMVerifier:
    """A language model as verifier: four lines, or a JSON object where the engine holds texts to schemas."""

    engine: Engine
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    grammar: bool = True
    prompt: str = ""

    async def verify(
        self, query: Query, action: Action, result: ToolResult, memory: Memory, analysis: str = ""
    ) -> Verification:
        """See `Verifier.verify`."""
        structure = structure_of(self.engine) if self.grammar else "text"
        sections = template("verifier", self.prompt)
        system = sections["system"].substitute(
            format=sections["json" if structure == "json" else "format"].substitute()
        )
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
            Message("system", (system + "\n",)),
            Message("user", (query_part(query.text, analysis), *turns, latest, sections["tail"].substitute())),
        )
        sampling = self.sampling.seeded(request_seed(query.seed, "verifier", memory.next_index))
        grammar = VERIFIER_GRAMMAR if structure == "grammar" else None
        schema = _SCHEMA if structure == "json" else None
        generation = await self.engine.generate(GenerateRequest(messages, sampling, grammar, schema))
        return Verification(parse_verdict(generation, json=structure == "json"), generation)


def parse_verdict(generation: Generation, json: bool = False) -> Verdict:
    """The verdict that a text is; continue with the reason UNREADABLE when it is none."""
    unreadable = Verdict(stop=False, reason=UNREADABLE)
    if json:
        try:
            fields = parse_fields(generation, _FIELDS)
        except ValueError:
            return unreadable
        contradictions = tuple(fields["contradictions"])
        if not all(isinstance(one, str) and one.strip() for one in contradictions):
            return unreadable
    else:
        match = _VERDICT.fullmatch(generation.text)
        cut = generation.finish_reason is FinishReason.LENGTH and not generation.text.endswith("\n")
        if match is None or cut:
            return unreadable
        fields = match.groupdict()
        said = fields["contradictions"].strip()
        contradictions = () if said.rstrip(".").lower() == "none" else (said,)
    if any(_DENIAL.fullmatch(one.strip()) for one in contradictions):
        return unreadable
    sufficient = fields["memory"] == "sufficient"
    return Verdict(
        stop=sufficient and not contradictions,
        reason=fields["reason"].strip(),
        valid=fields["result"] == "valid",
        sufficient=sufficient,
        contradictions=contradictions,
    )
