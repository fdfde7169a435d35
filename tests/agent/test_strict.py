"""Model text of any kind: never a crash and never a guess, in every format."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from decimal import Decimal

import pytest

from midflight.agent.actions import action_schema, parse_action, parse_json_action, render_action
from midflight.agent.generator import parse_answer, parse_json_answer
from midflight.agent.strict import parse_fields, parse_object
from midflight.agent.types import Action, Answer, Claim, Verdict
from midflight.agent.verifier import UNREADABLE, parse_verdict
from midflight.engines.base import FinishReason, Generation
from midflight.tools.base import FINISH, Toolset
from tests.agent.doubles import PairTool

PIECES = (
    ["Sub-goal: ", "Tool: ", "Context: ", "Result: ", "Memory: ", "Contradictions: ", "Reason: ", "Answer: ", FINISH]
    + [
        "valid",
        "invalid",
        "sufficient",
        "insufficient",
        "none",
        "pair",
        "find it",
        "\n",
        "\n\n",
        " ",
        "```",
        "```json\n",
    ]
    + ["{", "}", "[", "]", '"', ":", ", ", "null", "true", "NaN", "1e999", "\\ud800", "\\u0000", "\ud800", "\x00", "\r"]
    + ['"sub_goal"', '"tool"', '"context"', '"result"', '"memory"', '"contradictions"', '"reason"', '"answer"']
    + [
        '"claims"',
        '"text"',
        '"turns"',
        '"sources"',
        "[turn 1]",
        "[turn 1: x]",
        "[turns 1, 2]",
        "<think>\n",
        "\n</think>\n",
        "[turn 99999999999]",
        "<|im_end|>",
    ]
    + ["\u2028", "😀", "Ω", "٣", "<think>", "</think>", "9" * 50]
    + [
        "turn 1",
        "turn 2",
        "turn 9",
        ", turn 3",
        "Turns ",
        "1",
        "2",
        "e9",
        " and ",
        "agree",
        "no ",
        "not ",
        ".",
        "[1, 2]",
        "[[3, 1]]",
    ]
)
WHOLE = [
    " pair: a\n",
    "finish\n",
    "<think>\nx\n</think>\n\nSub-goal: find it\nTool: pair\nContext: a\n\n",
    "\n\nResult: valid\nMemory: sufficient\nContradictions: none\nReason:\n\n",
    '```json\n{"sub_goal": "find it", "tool": "pair", "context": "a"}\n```\n',
    "Answer: x [turn 1, turn 2] y [Turns 1 and 2: x]. z [Turn 2; Turn 1]\n",
    "<think>\nx\nAnswer: x\n",
    "Sub-goal: find it\nTool: pair\nContext: a\nb",
    "Sub-goal: find it\nTool: finish",
    '{"sub_goal": "find it", "tool": "pair", "context": "a"}',
    "Result: valid\nMemory: sufficient\nContradictions: none\nReason: x\n",
    "Result: valid\nMemory: sufficient\nContradictions: turn 1, turn 2\nReason: x\n",
    "Result: invalid\nMemory: insufficient\nContradictions: Turns 1 and 3.\nReason: x\n",
    '{"result": "valid", "memory": "sufficient", "contradictions": [], "reason": "x"}',
    '{"result": "valid", "memory": "insufficient", "contradictions": [[1, 2], [2, 3, 1]], "reason": "x"}',
    "Answer: x [turn 1]. y\n",
    '{"answer": "x", "claims": [{"text": "x", "turns": [1], "sources": ["x"]}]}',
    '{"answer": "x. No. y", "claims": []}',
    '{"a": 0.1, "b": [-1e308, {"c": 12345678901234567890}], "d": 2.5}',
]
MARKS = re.compile(r"(?<!\s)\s*\[[Tt]urns? \d{1,9}((, |; | and )([Tt]urn )?\d{1,9}){0,99}(: [^\n\[\]]{1,500})?\]")
RESULTS = {1: "x"}
TURNS = 3
JSON_ERRORS = (ValueError, RecursionError)


def texts(count: int, seed: int = 0) -> list[str]:
    """Whole answers with something changed, and pieces in any order."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        text = draw.choice(WHOLE) if number % 4 else "".join(draw.choices(PIECES, k=draw.randrange(12)))
        for _ in range(draw.randrange(3)):
            at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
            text = text[:at] + draw.choice((draw.choice(PIECES), "", text[at:end] * 2)) + text[end:]
        made.append(text)
    return made


def spoken(text: str) -> str:
    """Without what is in front of an answer: blank lines, and a thought that has an end."""
    before, end, behind = text.lstrip().partition("</think>")
    return (behind if end and before.startswith("<think>") else text).lstrip()


def unfenced(text: str) -> str:
    first, *lines = spoken(text).rstrip().split("\n")
    return "\n".join(lines[:-1]) if first in ("```", "```json") and lines[1:] and lines[-1] == "```" else spoken(text)


def loads(text: str) -> object:
    try:
        return json.loads(unfenced(text))
    except JSON_ERRORS:
        return None


def spelt_numbers(text: str) -> list[Decimal]:
    """The numbers of a JSON text, however large."""
    found: list[Decimal] = []
    json.loads(
        text,
        parse_int=lambda digits: found.append(Decimal(digits)),
        parse_float=lambda digits: found.append(Decimal(digits)),
    )
    return found


def numbers(value: object) -> list[float]:
    """The same of what was read."""
    if isinstance(value, dict | list):
        return [one for part in (value.values() if isinstance(value, dict) else value) for one in numbers(part)]
    return [value] if type(value) in (int, float) else []


def check(text: str) -> int:
    """Every parser on one text; whatever is read spells exactly what was written. Returns how many read it."""
    said, found = Generation(text, FinishReason.STOP), 0
    for style in ("compact", "full"):
        action, problem = parse_action(said, style)  # type: ignore[arg-type]
        assert (action is None) == bool(problem)
        wrote = text if style == "compact" else spoken(text)
        if action is not None and action.tool != FINISH:
            assert render_action(action, style).strip() == wrote.strip()  # type: ignore[arg-type]
            found += 1
        elif action is not None:
            goal, _, context = wrote.partition("\nContext:")
            assert goal.strip() == (FINISH if style == "compact" else f"Sub-goal: {action.sub_goal}\nTool: {FINISH}")
            assert context.strip() == action.context
            found += 1
    action, problem = parse_json_action(said)
    assert (action is None) == bool(problem)
    if action is not None:
        spelt = loads(text)
        assert isinstance(spelt, dict)
        if action.tool == FINISH:
            spelt["context"] = spelt["context"].strip()
        assert spelt == {"sub_goal": action.sub_goal, "tool": action.tool, "context": action.context}
        found += 1
    try:
        read = numbers(parse_object(said))
    except ValueError:
        pass
    else:
        for number, written in zip(read, spelt_numbers(unfenced(text)), strict=True):
            assert abs(Decimal(number) - written) <= abs(written) * Decimal("1e-15")
    verdict = parse_verdict(said, TURNS)
    if verdict.reason != UNREADABLE:
        memory = "sufficient" if verdict.sufficient else "insufficient"
        lines = spoken(text).rstrip().split("\n")
        assert lines[:2] == [f"Result: {'valid' if verdict.valid else 'invalid'}", f"Memory: {memory}"]
        assert len(lines) == 4 and lines[3].startswith("Reason:") and verdict.reason == lines[3][7:].strip()
        assert verdict.contradictions == spelt_contradictions(lines[2])
        assert verdict.stop == (verdict.sufficient and not verdict.contradictions)
        found += 1
    verdict = parse_verdict(said, TURNS, json=True)
    if verdict.reason != UNREADABLE:
        value = loads(text)
        assert isinstance(value, dict) and len(value["contradictions"]) == len(verdict.contradictions)
        for turns, contradiction in zip(value["contradictions"], verdict.contradictions, strict=True):
            assert spelt_contradictions(f"Contradictions: turns {str(turns)[1:-1]}") == (contradiction,)
        assert verdict.reason == value["reason"].strip()
        assert (value["result"] == "valid", value["memory"] == "sufficient") == (verdict.valid, verdict.sufficient)
        found += 1
    answer = parse_answer(said, RESULTS)
    assert answer.text == spelt_answer(text)
    assert "".join("".join(claim.text for claim in answer.claims).split()) == "".join(answer.text.split())
    if answer.text:
        claimed = [(set(claim.turns), set(claim.sources)) for claim in answer.claims]
        assert all(turns <= {1} and sources <= {"x"} for turns, sources in claimed)
        marked = re.search(r"\[[Tt]urns? ([^\]:]*\D)?1\D", text.strip().rpartition("\n")[2])
        assert marked or not any(turns for turns, _ in claimed)
        found += 1
    answer = parse_json_answer(said, RESULTS)
    if answer.text:
        value = loads(text)
        assert isinstance(value, dict) and answer.text == value["answer"].strip()
        given, added = answer.claims[: len(value["claims"])], answer.claims[len(value["claims"]) :]
        assert list(given) == [
            Claim(
                one["text"].strip(), (1,) * (1 in one["turns"]), ("x",) * (1 in one["turns"] and "x" in one["sources"])
            )
            for one in value["claims"]
        ]
        assert all(not claim.supported and claim.text in answer.text for claim in added)
        assert given or "".join("".join(claim.text for claim in added).split()) == "".join(answer.text.split())
        found += 1
    return found


def spelt_answer(text: str) -> str:
    """The last line that is not blank, without its marks, if it alone begins as an answer does."""
    lines = [line for line in spoken(text).split("\n") if line.strip()] or [""]
    if lines[0].startswith("<think>"):
        return ""
    begin = [line.startswith("Answer: ") and line[8:9].strip() != "" for line in lines]
    return MARKS.sub("", lines[-1][8:]).strip() if begin[-1] and not any(begin[:-1]) else ""


def spelt_contradictions(line: str) -> tuple[str, ...]:
    """Those that a line spells: it has no word but `none`, or none but `turn`, `and` and two numbers of turns or more.

    So whatever a language has to deny or to affirm something with, it is in no line that is read.
    """
    begin, *words = line.lower().removesuffix(".").replace(",", " ").split()
    assert begin == "contradictions:"
    if words == ["none"]:
        return ()
    numbers = [word for word in words if word not in ("turn", "turns", "and")]
    turns = [turn for turn in range(1, TURNS + 1) if str(turn) in numbers]
    assert len(turns) >= 2 and set(numbers) == {str(turn) for turn in turns}, line
    return (", ".join(f"turn {number}" for number in dict.fromkeys(numbers)),)


@pytest.fixture
def within() -> Iterator[None]:
    """Ends a test that takes minutes where it should take less than a second: the event loop would stand still."""

    def end(*_: object) -> None:
        raise TimeoutError("more than 30 s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_hundred_thousand_texts_are_read_exactly_or_not_at_all() -> None:
    read = sum(map(check, texts(100_000)))
    assert 20_000 < read < 100_000  # neither everything nor nothing


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, '{"a": "' + "x" * 1_000_000, ""]
    + ["Result: valid\nMemory: sufficient\nContradictions: none\nReason:" + " " * 100_000 + "\nDone."]
    + [
        "Sub-goal: a\nTool: pair\nContext: a" + "\n" * 100_000 + " ",
        "Answer: x" + " " * 100_000 + "y",
        "Answer: " + "a. " * 10_000,
        "Answer: " + "[turn 1: x" * 10_000,
    ],
)
def test_extreme_texts_are_refused(text: str, within: None) -> None:
    with pytest.raises(ValueError):
        parse_object(Generation(text, FinishReason.STOP))
    check(text)


def test_objects_have_exactly_the_fields_asked_for() -> None:
    fields = {"kind": ("a", "b"), "count": int}

    def parsed(text: str, finish: FinishReason = FinishReason.STOP) -> object:
        try:
            return parse_fields(Generation(text, finish), fields)
        except ValueError as error:
            return str(error)

    assert parsed(' {"kind": "a", "count": 2}\n') == {"kind": "a", "count": 2}
    assert parsed('{"kind": "a"}') == "its keys are not kind, count"
    assert parsed('{"kind": "a", "count": 2, "x": 1}') == "its keys are not kind, count"
    assert parsed('{"kind": "c", "count": 2}') == "kind is not as asked for"
    assert parsed('{"kind": "a", "count": true}') == "count is not as asked for"
    assert parsed('{"kind": "a", "kind": "b", "count": 2}') == "a key appears twice"
    assert parsed('{"kind": "\\ud800", "count": 2}') == "it has half of a character"
    assert parsed('{"kind": "a", "count": 2}', FinishReason.LENGTH) == "the text was cut off by the token limit"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1.8e308", "9" * 400 + ".0"])
def test_a_number_that_no_float_is_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="a number is too large"):
        parse_object(Generation(f'{{"a": [{{"b": {number}}}]}}', FinishReason.STOP))
    assert parse_object(Generation('{"a": -1.7e308}', FinishReason.STOP)) == {"a": -1.7e308}


def test_an_action_as_json() -> None:
    def parsed(text: str) -> Action | None:
        return parse_json_action(Generation(text, FinishReason.STOP))[0]

    assert parsed('{"sub_goal": "s", "tool": "pair", "context": "a\\nb"}') == Action("s", "pair", "a\nb")
    assert parsed('{"sub_goal": "s", "tool": "finish", "context": ""}') == Action("s", "finish", "")
    for wrong in ('"sub_goal": "a\\nb"', '"sub_goal": " "', '"tool": "a b"', '"tool": ""', '"context": " "'):
        fields = {"sub_goal": "s", "tool": "pair", "context": "c"} | json.loads(f"{{{wrong}}}")
        assert parsed(json.dumps(fields)) is None, wrong
    schema = json.loads(action_schema(Toolset([PairTool()])))
    assert schema["properties"]["tool"]["enum"] == ["pair", "finish"]
    assert schema["required"] == ["sub_goal", "tool", "context"] and schema["additionalProperties"] is False


def test_verdict_and_answer_as_json() -> None:
    def verdict(**fields: object) -> Verdict:
        whole = {"result": "valid", "memory": "sufficient", "contradictions": [], "reason": "r"} | fields
        return parse_verdict(Generation(json.dumps(whole), FinishReason.STOP), 2, json=True)

    assert verdict() == Verdict(True, "r", True, True)
    assert verdict(contradictions=[[2, 1]]) == Verdict(False, "r", True, True, ("turn 2, turn 1",))
    assert verdict(result="invalid", memory="insufficient") == Verdict(False, "r", False, False)
    for wrong in ({"result": "good"}, {"contradictions": "none"}, {"contradictions": [1]}, {"reason": None}, {"x": 1}):
        assert verdict(**wrong) == Verdict(False, UNREADABLE)
    for wrong in ([], [1], [2, 2], [0, 1], [2, 3], [True, 2], [1.0, 2], ["1", "2"], "none", "turn 1, turn 2", None):
        assert verdict(contradictions=[[1, 2], wrong]) == Verdict(False, UNREADABLE)

    def answer(*claims: object) -> Answer:
        text = json.dumps({"answer": " a ", "claims": list(claims)})
        return parse_json_answer(Generation(text, FinishReason.STOP), {1: "from https://x", 2: ""})

    assert answer() == Answer("a", (Claim("a", ()),))

    assert answer({"text": "a", "turns": [2, 1, 1, 3], "sources": ["https://x", "https://y", ""]}) == Answer(
        "a", (Claim("a", (2, 1), ("https://x",)),)
    )
    assert answer({"text": "a", "turns": [3], "sources": ["https://x"]}) == Answer("a", (Claim("a", ()),))
    for wrong in ("t", {"text": "t", "turns": [1]}, {"text": "t", "turns": [True], "sources": []}):
        assert answer(wrong) == Answer("")
