"""The generator answers from memory, and says which turns support each statement.

Invariant: a claim names only turns that exist; a text without the `Answer: ` line is an empty answer, not a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Protocol

from midflight.agent.memory import Memory
from midflight.agent.prompting import query_part, request_seed, template
from midflight.agent.types import Answer, Claim, Query
from midflight.engines.base import Engine, GenerateRequest, Generation, Message, Sampling, structure_of
from midflight.tools.base import FINISH

__all__ = ["GENERATOR_GRAMMAR", "Generated", "Generator", "LLMGenerator", "LastResultGenerator", "parse_answer"]

GENERATOR_GRAMMAR = """start: "Answer: " ANSWER "\\n"
ANSWER: /[^ \\t\\r\\n][^\\r\\n]*/
"""
_ANSWER = re.compile(r"^Answer: (\S[^\n]*)$", re.MULTILINE)
_MARK = re.compile(r"\s*\[turn (\d{1,9})\]")
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=\]))\s+(?!\[turn \d)")


@dataclass(frozen=True)
class Generated:
    """An answer and the generation it was read from, if any."""

    answer: Answer
    generation: Generation | None = None


class Generator(Protocol):
    """Answers from memory."""

    async def generate(self, query: Query, memory: Memory, analysis: str) -> Generated:
        """The answer.

        Raises:
            PromptTooLong: the prompt exceeds the engine's context or the memory its budget.
            EngineError: the engine failed.
        """
        ...


@dataclass(frozen=True)
class LastResultGenerator:
    """Answers with the result of the last call; with an empty text when that call failed or there was none.

    A planner on this rule has to end on the result that answers the question.
    """

    async def generate(self, query: Query, memory: Memory, analysis: str) -> Generated:
        """See `Generator.generate`; never fails."""
        calls = [turn for turn in memory.turns if turn.action is None or turn.action.tool != FINISH]
        if not calls or calls[-1].result.error is not None:
            return Generated(Answer(""))
        text = calls[-1].result.text
        return Generated(Answer(text, (Claim(text, (calls[-1].index,)),)))


@dataclass(frozen=True)
class LLMGenerator:
    """A language model that writes `Answer: ` and one paragraph with `[turn n]` after each statement."""

    engine: Engine
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    grammar: bool = True

    async def generate(self, query: Query, memory: Memory, analysis: str) -> Generated:
        """See `Generator.generate`."""
        sections = template("generator")
        turns = memory.parts(memory.budget_tokens, self.engine.count_tokens, "full")
        messages = (
            Message("system", (sections["system"].substitute() + "\n",)),
            Message("user", (query_part(query.text, analysis), *turns, sections["tail"].substitute())),
        )
        sampling = replace(self.sampling, seed=request_seed(query.seed, "generator", memory.next_index))
        grammar = GENERATOR_GRAMMAR if self.grammar and structure_of(self.engine) == "grammar" else None
        generation = await self.engine.generate(GenerateRequest(messages, sampling, grammar))
        return Generated(parse_answer(generation.text, turns=len(memory.turns)), generation)


def parse_answer(text: str, turns: int) -> Answer:
    """The answer on the only `Answer: ` line of `text`, an empty one if there is not exactly one such line.

    Marks are taken out of the answer's text. Each sentence is a claim; its turns are those of its marks that lie in
    1..`turns`, in order, each once.
    """
    lines = _ANSWER.findall(text)
    if len(lines) != 1:
        return Answer("")
    claims = []
    for sentence in _SENTENCE_END.split(lines[0].strip()):
        named = dict.fromkeys(int(number) for number in _MARK.findall(sentence))
        statement = _MARK.sub("", sentence).strip()
        if statement:
            claims.append(Claim(statement, tuple(number for number in named if 1 <= number <= turns)))
    return Answer(_MARK.sub("", lines[0]).strip(), tuple(claims))
