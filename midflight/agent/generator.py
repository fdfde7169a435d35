"""The generator: makes the answer from the query and the memory, each claim with the turns that support it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Protocol

from midflight.agent.memory import Memory, Style
from midflight.agent.prompts import template
from midflight.agent.types import Answer, Claim, Generation, Query
from midflight.engines.base import Engine, GenerateRequest, Message, Sampling
from midflight.tools.base import FINISH

GRAMMAR = 'start: "Answer: " /[^\\n ][^\\n]{0,399}/ "\\n"\n'
_MARKS = re.compile(r"((?:\s*\[turn \d+\])+)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Generated:
    """The answer, and the generator's own generation when a model gave it."""

    answer: Answer
    generation: Generation | None = None


class Generator(Protocol):
    """Makes the answer at the end of a trajectory."""

    async def generate(self, query: Query, memory: Memory, analysis: str, seed: int | None) -> Generated:
        """Raises EngineError or PromptTooLong."""
        ...


@dataclass(frozen=True)
class LastResultGenerator:
    """Answers with the last successful result; with an empty text when there is none."""

    async def generate(self, query: Query, memory: Memory, analysis: str, seed: int | None) -> Generated:
        for turn in reversed(memory.turns):
            if turn.action is not None and turn.action.tool != FINISH and turn.result.error is None:
                text = turn.result.text
                return Generated(Answer(text, (Claim(text, (turn.index,)),)))
        return Generated(Answer(""))


@dataclass(frozen=True)
class LLMGenerator:
    """A language model that writes the answer."""

    engine: Engine
    style: Style = "full"
    sampling: Sampling = Sampling(temperature=0.0)
    grammar: bool = True
    memory_tokens: int = 512

    async def generate(self, query: Query, memory: Memory, analysis: str, seed: int | None) -> Generated:
        parts = memory.parts(self.memory_tokens, self.engine.count_tokens, self.style)
        asked = f"Question: {query.text}\n" + (f"Analysis: {analysis}\n" if analysis else "")
        generation = await self.engine.generate(
            GenerateRequest(
                messages=(
                    Message("system", (template("generator"),)),
                    Message("user", (asked, *parts, "Write the answer.")),
                ),
                sampling=replace(self.sampling, seed=seed),
                grammar=GRAMMAR if self.grammar else None,
            )
        )
        known = frozenset(turn.index for turn in memory.turns)
        return Generated(parse_answer(generation.text, known), generation)


def parse_answer(text: str, known_turns: frozenset[int]) -> Answer:
    """The answer in `text`, its marks taken out; marks of turns that do not exist support nothing.

    A text without the `Answer:` field is an empty answer.
    """
    field, colon, body = text.strip().partition("Answer:")
    if field or not colon:
        return Answer("")
    pieces = _MARKS.split(body.strip())
    claims = []
    for claim, marks in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        turns = tuple(int(number) for number in _NUMBER.findall(marks))
        if claim.strip(" .,;"):
            claims.append(Claim(claim.strip(), tuple(turn for turn in turns if turn in known_turns)))
    return Answer(_MARKS.sub("", body).strip(), tuple(claims))
