"""The generator answers from memory, and says which turns support each statement.

Invariant: a claim names only turns that called a tool and sources that their results hold; each sentence of an answer
is in a claim; a text that is not in the format is an empty answer, not a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from midflight.agent.memory import Memory
from midflight.agent.prompting import cut_middle, one_line, query_part, request_seed, template
from midflight.agent.strict import object_schema, parse_fields, said
from midflight.agent.types import Answer, Claim, Query
from midflight.engines.base import Engine, FinishReason, GenerateRequest, Generation, Message, Sampling, structure_of
from midflight.tools.base import FINISH

__all__ = [
    "GENERATOR_GRAMMAR",
    "Generated",
    "Generator",
    "LLMGenerator",
    "LastResultGenerator",
    "parse_answer",
    "parse_json_answer",
]

GENERATOR_GRAMMAR = """start: "Answer: " ANSWER "\\n"
ANSWER: /[^ \\t\\r\\n][^\\r\\n]*/
"""
MOST_SHOWN = 200
"""Characters of a text that holds no answer."""
_ANSWER = re.compile(r"^Answer: (\S[^\n]*)(\n?)", re.MULTILINE)
_TURN = r"\[[Tt]urns? (\d{1,9}(?:(?:, |; | and )(?:[Tt]urn )?\d{1,9}){0,99})(?:: ([^\[\]\n]{1,500}))?\]"
_MARK = re.compile(rf"(?<!\s)\s*{_TURN}")
_CLAIM = ("text", "turns", "sources")
_SCHEMA = object_schema(
    {
        "answer": {"type": "string"},
        "claims": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "turns": {"type": "array", "items": {"type": "integer"}},
                    "sources": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["text", "turns", "sources"],
                "additionalProperties": False,
            },
        },
    }
)
_SENTENCE_END = re.compile(
    rf"(?:(?:(?P<mark>{_TURN})(?P<end>[.!?]?)|[.!?])[\"'”’)]*\s+|(?P<wide>[。！？])[\"'”’」』)]*\s*|(?P<line>\n)\s*)"
    r"(?!\s|\[[Tt]urns? \d)"
)
_GOES_ON = tuple(
    (re.compile(rf"(?:{before})\.$"), re.compile(after))
    for before, after in (
        (r"(?<!\d )\b[A-Z]", r"(?!(?:It|Its|The|This|These|That|They|He|She|In|But)\b)"),
        (r"\b(?:Dr|Mr|Mrs|Ms|Prof|St|Mt|Gen|Gov|Sen|Rep|Capt|Col|Lt|Sgt|vs|cf|et al|e\.g|i\.e|[Ff]igs?|[Ee]qs?)", ""),
        (r"\b(?:Nos?|Nr|pp?|[Vv]ol|[Cc]h|[Ss]ec|approx|ca|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)", r"\d"),
        (r"\b(?:Inc|Ltd|Co|Corp|Jr|Sr|etc|[ap]\.m)|\.\.", "[a-z]"),
    )
)
"""Behind what, and before what, a point ends no sentence: initials, titles, abbreviations, an ellipsis."""
_LONGEST_BEFORE = 8
_BULLET = re.compile(r"^(?:[-*•–]|\d{1,3}[.)])\s+")
_JOINTS = {"\0", "and", "or", "but", "while", "so"}
"""What may stand between claims in a sentence of several."""
_ENDS = ".,;:!?。！？，、；：\"'“”‘’「」『』()[]"


@dataclass(frozen=True)
class Generated:
    """An answer and the generation it was read from, if any; `problem` says what a language model wrote instead."""

    answer: Answer
    generation: Generation | None = None
    problem: str = ""


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
    """A language model that writes `Answer: ` and one paragraph with `[turn n]` after each statement, or the answer and
    its claims as JSON where the engine holds texts to schemas."""

    engine: Engine
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    grammar: bool = True
    prompt: str = ""

    async def generate(self, query: Query, memory: Memory, analysis: str) -> Generated:
        """See `Generator.generate`."""
        structure = structure_of(self.engine) if self.grammar else "text"
        sections = template("generator", self.prompt)
        system = sections["system"].substitute(
            format=sections["json" if structure == "json" else "format"].substitute()
        )
        turns = memory.parts(memory.budget_tokens, self.engine.count_tokens, "full")
        messages = (
            Message("system", (system + "\n",)),
            Message("user", (query_part(query.text, analysis), *turns, sections["tail"].substitute())),
        )
        sampling = self.sampling.seeded(request_seed(query.seed, "generator", memory.next_index))
        grammar = GENERATOR_GRAMMAR if structure == "grammar" else None
        schema = _SCHEMA if structure == "json" else None
        generation = await self.engine.generate(GenerateRequest(messages, sampling, grammar, schema))
        called = [turn for turn in memory.turns if turn.call is not None and turn.call.tool != FINISH]
        results = {turn.index: turn.result.text for turn in called}
        answer = (parse_json_answer if structure == "json" else parse_answer)(generation, results)
        if answer.text:
            return Generated(answer, generation)
        cut = generation.finish_reason is FinishReason.LENGTH
        wrote = f"{'cut off by max_tokens, ' if cut else ''}{cut_middle(one_line(generation.text), MOST_SHOWN)!r}"
        return Generated(answer, generation, f"the generator's text holds no answer in its format: {wrote}")


def parse_answer(generation: Generation, results: Mapping[int, str]) -> Answer:
    """The answer on the `Answer: ` line of a text; empty if that line is cut off or anything but blanks follows it.

    What comes before the line is not looked at. Marks are taken out of the answer's text. Each sentence is a claim;
    its turns are those of its marks that `results`, by turn, has, in order, each once; its sources those that the
    result of their turn holds.
    """
    text = said(generation.text)
    line = None if text.startswith("<think>") else _ANSWER.search(text)  # in a thought without an end nothing is said
    if line is None or text[line.end() :].strip():
        return Answer("")
    if generation.finish_reason is FinishReason.LENGTH and not line[2]:
        return Answer("")
    claims = []
    for sentence in _sentences(line[1].strip()):
        marks = [(int(turn), source) for turns, source in _MARK.findall(sentence) for turn in re.findall(r"\d+", turns)]
        statement = _MARK.sub("", sentence).strip()
        if statement:
            sources = [source for number, source in marks if source and _holds(results.get(number, ""), source)]
            claims.append(
                Claim(statement, _known((number for number, _ in marks), results), tuple(dict.fromkeys(sources)))
            )
    return Answer(_MARK.sub("", line[1]).strip(), tuple(claims))


def parse_json_answer(generation: Generation, results: Mapping[int, str]) -> Answer:
    """The answer that a JSON text is, an empty one if it is none. Turns and sources: see `parse_answer`.

    A sentence of the answer that neither stands in a claim word for word nor is made up of claims is one without turns.
    """
    try:
        fields = parse_fields(generation, {"answer": str, "claims": list})
        claims = [_claim(one, results) for one in fields["claims"]]
    except ValueError:
        return Answer("")
    answer = fields["answer"].strip()
    claimed = [words for words in (_words(claim.text) for claim in claims) if words.strip()]
    for sentence in _sentences(answer):
        words = _words(_BULLET.sub("", sentence))
        if not any(words in one for one in claimed) and not _made_of(words, claimed):
            claims.append(Claim(sentence, ()))
    return Answer(answer, tuple(claims))


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a text, each with its marks; in doubt, as behind an initial, what follows belongs to it too."""
    start = 0
    for end in _SENTENCE_END.finditer(text):
        if not _goes_on(text, start, end):
            yield text[start : end.end()].strip()
            start = end.end()
    if text[start:].strip():
        yield text[start:].strip()


def _goes_on(text: str, start: int, end: re.Match[str]) -> bool:
    """Whether the sentence from `start` goes on behind what `end` has found: so behind a mark in its middle, a mark or
    the number of a list at its beginning, and an abbreviation."""
    before = text[start : end.start()].strip()
    if not before:
        return True
    if end["mark"]:
        return not end["end"] and text[end.end() : end.end() + 1].islower()
    if end["wide"] or end["line"]:
        return False
    first, last = max(start, end.start() - _LONGEST_BEFORE), end.start() + 1
    return before.isdecimal() or any(
        behind.search(text, first, last) and ahead.match(text, end.end()) for behind, ahead in _GOES_ON
    )


def _words(text: str) -> str:
    """A text's words with one space around each, to look for whole ones; punctuation at their ends is left out."""
    return f" {' '.join(word for word in (part.strip(_ENDS) for part in text.casefold().split()) if word)} "


def _made_of(words: str, claimed: Iterable[str]) -> bool:
    """Whether nothing but joints is left of a sentence once claims' texts are taken out, the longest first."""
    for one in sorted(claimed, key=len, reverse=True):
        words = words.replace(one, " \0 ")  # what is left on both sides is not to become a text
    left = set(words.split())
    return "\0" in left and left <= _JOINTS


def _claim(value: object, results: Mapping[int, str]) -> Claim:
    """Raises ValueError where it is none."""
    if not isinstance(value, dict) or value.keys() != set(_CLAIM):
        raise ValueError("a claim has other keys")
    text, turns, sources = value["text"], value["turns"], value["sources"]
    fits = isinstance(text, str) and isinstance(turns, list) and isinstance(sources, list)
    if not fits or not all(type(turn) is int for turn in turns) or not all(isinstance(one, str) for one in sources):
        raise ValueError("a claim has other values")
    known = _known(turns, results)
    held = [one for one in sources if one.strip() and any(_holds(results[turn], one) for turn in known)]
    return Claim(text.strip(), known, tuple(dict.fromkeys(held)))


def _holds(text: str, source: str) -> bool:
    """Whether a source stands in a text by itself, not as part of a longer name or address."""
    name = re.escape(source)  # first, as a search for a literal is the fast one
    return re.search(rf"{name}(?<![\w.@-]{name})(?![/.?#&=%@~+-]{{0,9}}\w)", text) is not None


def _known(turns: Iterable[int], results: Mapping[int, str]) -> tuple[int, ...]:
    return tuple(turn for turn in dict.fromkeys(turns) if turn in results)
