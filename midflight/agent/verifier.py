"""The verifier judges each result, and says whether the memory suffices to answer.

Invariant: only a whole verdict in the exact format stops a run, when it finds the memory sufficient and no
contradiction; a text that is not in the format means continue. A contradiction is written as the turns between which it
is and nothing else, so that no sentence has to be understood to tell one from a denial.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from midflight.agent.memory import Memory, render_turn
from midflight.agent.prompting import query_part, request_seed, template
from midflight.agent.strict import object_schema, parse_fields, said
from midflight.agent.types import UNJUDGED, Action, Query, ToolCall, ToolResult, Verdict
from midflight.engines.base import Engine, FinishReason, GenerateRequest, Generation, Message, Sampling, structure_of

__all__ = ["LLMVerifier", "RuleVerifier", "VERIFIER_GRAMMAR", "Verification", "Verifier", "parse_verdict"]

VERIFIER_GRAMMAR = """start: RESULT MEMORY "Contradictions: " CONTRADICTIONS "\\nReason: " REASON "\\n"
RESULT: "Result: valid\\n" | "Result: invalid\\n"
MEMORY: "Memory: sufficient\\n" | "Memory: insufficient\\n"
CONTRADICTIONS: /none|turn [1-9][0-9]{0,3}(, turn [1-9][0-9]{0,3}){1,9}/
REASON: /[^ \\t\\r\\n][^\\r\\n]{0,199}/
"""
_VERDICT = re.compile(
    r"Result: (?P<result>valid|invalid)\nMemory: (?P<memory>sufficient|insufficient)\n"
    r"Contradictions: (?P<contradictions>\S[^\n]*)\nReason:(?P<reason>[^\n]*)(?:\n\s*)?"
)
_NONE = re.compile(r"none\.?", re.ASCII | re.IGNORECASE)
_TURNS = re.compile(r"turns? [1-9][0-9]{0,8}(?:(?:,|,? and) (?:turn )?[1-9][0-9]{0,8})+\.?", re.ASCII | re.IGNORECASE)
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
        "contradictions": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "reason": {"type": "string"},
    }
)
UNREADABLE = "the verifier's answer was unreadable"


@dataclass(frozen=True)
class Verification:
    """A verdict and the generation it was read from, if any."""

    verdict: Verdict
    generation: Generation | None = None


_CONTINUE = Verification(UNJUDGED)


class Verifier(Protocol):
    """Judges the latest turn, which is not in memory yet."""

    async def verify(
        self,
        query: Query,
        action: Action,
        result: ToolResult,
        memory: Memory,
        analysis: str = "",
        call: ToolCall | None = None,
    ) -> Verification:
        """The verdict on turn `memory.next_index`, in which `call`, if any, gave `result`.

        Raises:
            PromptTooLong: the prompt exceeds the engine's context or the memory its budget.
            EngineError: the engine failed.
        """
        ...


@dataclass(frozen=True)
class RuleVerifier:
    """Never stops and adds no reason: an error already says what went wrong."""

    async def verify(
        self,
        query: Query,
        action: Action,
        result: ToolResult,
        memory: Memory,
        analysis: str = "",
        call: ToolCall | None = None,
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
        self,
        query: Query,
        action: Action,
        result: ToolResult,
        memory: Memory,
        analysis: str = "",
        call: ToolCall | None = None,
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
            call,
            result,
            None,
            style="full",
            result_tokens=memory.budget_tokens // 2,
            count_tokens=self.engine.count_tokens,
        )
        beside = self.engine.count_tokens(latest)
        turns = memory.parts(memory.budget_tokens, self.engine.count_tokens, "full", beside)
        messages = (
            Message("system", (system + "\n",)),
            Message("user", (query_part(query.text, analysis), *turns, latest, sections["tail"].substitute())),
        )
        sampling = self.sampling.seeded(request_seed(query.seed, "verifier", memory.next_index))
        grammar = VERIFIER_GRAMMAR if structure == "grammar" else None
        schema = _SCHEMA if structure == "json" else None
        generation = await self.engine.generate(GenerateRequest(messages, sampling, grammar, schema))
        return Verification(parse_verdict(generation, memory.next_index, json=structure == "json"), generation)


def parse_verdict(generation: Generation, latest: int, json: bool = False) -> Verdict:
    """The verdict on turn `latest` that a text is; continue with the reason UNREADABLE when it is none."""
    try:
        fields = parse_fields(generation, _FIELDS) if json else _lines(generation)
        contradictions = tuple(_contradiction(turns, latest) for turns in fields["contradictions"])
    except ValueError:
        return Verdict(stop=False, reason=UNREADABLE)
    sufficient = fields["memory"] == "sufficient"
    return Verdict(
        stop=sufficient and not contradictions,
        reason=fields["reason"].strip(),
        valid=fields["result"] == "valid",
        sufficient=sufficient,
        contradictions=contradictions,
    )


def _lines(generation: Generation) -> dict[str, Any]:
    """The fields of a verdict in lines, as those of one in JSON. Raises ValueError where it is none."""
    match = _VERDICT.fullmatch(said(generation.text))
    if match is None or generation.finish_reason is FinishReason.LENGTH and not generation.text.endswith("\n"):
        raise ValueError("not the four lines")
    line = match["contradictions"].strip()
    if _NONE.fullmatch(line):
        return {**match.groupdict(), "contradictions": []}
    if not _TURNS.fullmatch(line):
        raise ValueError("neither none nor turns")
    return {**match.groupdict(), "contradictions": [[int(number) for number in re.findall("[0-9]+", line)]]}


def _contradiction(turns: object, latest: int) -> str:
    """The turns between which it is. Raises ValueError where they are not two that there are, or more."""
    if not isinstance(turns, list) or not all(type(turn) is int and 1 <= turn <= latest for turn in turns):
        raise ValueError("no list of turns")
    if len(set(turns)) < 2:
        raise ValueError("one turn alone")
    return ", ".join(f"turn {turn}" for turn in dict.fromkeys(turns))
