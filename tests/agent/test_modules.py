"""Executor, verifier and generator by themselves."""

import asyncio
import json
import re
from typing import Any

import pytest

from midflight.agent import (
    Action,
    Answer,
    Claim,
    DirectExecutor,
    ErrorKind,
    Execution,
    LastResultGenerator,
    LLMExecutor,
    LLMGenerator,
    LLMVerifier,
    Memory,
    Query,
    ToolCall,
    ToolResult,
    Turn,
    Verdict,
)
from midflight.agent.actions import parse_action, parse_json_action
from midflight.agent.generator import GENERATOR_GRAMMAR, parse_answer, parse_json_answer
from midflight.agent.prompting import request_seed, template
from midflight.agent.verifier import UNREADABLE, VERIFIER_GRAMMAR, parse_verdict
from midflight.engines.base import FinishReason, Generation
from midflight.engines.scripted import ScriptedEngine
from midflight.tools.base import FINISH, Toolset
from tests.agent.doubles import LookupTool, PairTool, prompt
from tests.agent.test_planner import accepts

NUMBER = LookupTool("number", {"7": "seven", "2.5": "half of five"}, schema={"type": "number"})
TOOLSET = Toolset([PairTool(), NUMBER])


def direct(context: str) -> Execution:
    return asyncio.run(DirectExecutor().execute(Action("", "number", context), TOOLSET, 1.0))


def written(answer: str | Generation) -> tuple[Execution, ScriptedEngine]:
    engine = ScriptedEngine([answer])
    execution = asyncio.run(LLMExecutor(engine).execute(Action("join", "pair", "a and `b`"), TOOLSET, 1.0, 3, 2))
    return execution, engine


def test_direct_executor_parses_numbers_strictly() -> None:
    assert direct("7") == Execution(ToolCall("number", {"key": 7}), ToolResult("seven"))
    assert direct("2.5").result == ToolResult("half of five")
    for context in ("7 people", "seven", "true", "NaN", "1e999", "0x7", "007", "[7]", ""):
        execution = direct(context)
        assert (execution.call, execution.result.error) == (None, ErrorKind.INVALID_ARGUMENTS)
        assert execution.result.text.startswith("key of number: expected ")


def test_llm_executor_calls_with_the_json_it_wrote() -> None:
    execution, engine = written('{"a": "x", "b": "y"}')
    assert (execution.call, execution.result) == (ToolCall("pair", {"a": "x", "b": "y"}), ToolResult("x-y"))
    assert execution.generation is not None
    request = engine.requests[0]
    assert request.sampling.seed == request_seed(3, "executor", 2)
    assert request.grammar is not None
    assert accepts(request.grammar, '{"a": "x", "b": "y"}') and not accepts(request.grammar, '{"a": "x"}')
    assert "Sub-goal: join\nContext:\n```\na and `b`\n```\n" in prompt(request)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x and y", "the arguments of pair are not one JSON object: Expecting value"),
        ('["x", "y"]', "the arguments of pair are not one JSON object: got a list"),
        ('{"a": "x", "b": "y"} {}', "the arguments of pair are not one JSON object: Extra data"),
        ('{"a": "x", "a": "z", "b": "y"}', "the arguments of pair are not one JSON object: a key appears twice"),
        ('{"a": NaN, "b": "y"}', "the arguments of pair are not one JSON object: NaN is not JSON"),
        ('{"a": 1e999, "b": "y"}', "the arguments of pair are not one JSON object: a number is too large"),
        ('{"a": "x"}', "pair: 'b' is a required property"),
        ('{"a": "x", "b": 1}', "pair: b: 1 is not of type 'string'"),
    ],
)
def test_llm_executor_names_what_is_wrong(text: str, reason: str) -> None:
    execution, _ = written(text)
    assert (execution.call, execution.result.error) == (None, ErrorKind.INVALID_ARGUMENTS)
    assert execution.result.text.startswith(reason)


def test_arguments_cut_by_the_token_limit_are_invalid() -> None:
    execution, _ = written(Generation('{"a": "x", "b": "y"}', FinishReason.LENGTH))
    assert execution.result.error is ErrorKind.INVALID_ARGUMENTS


def said(result: str, memory: str, contradictions: str = "none", reason: str = "known") -> str:
    return f"Result: {result}\nMemory: {memory}\nContradictions: {contradictions}\nReason: {reason}\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (said("valid", "sufficient"), Verdict(True, "known", True, True)),
        (said("invalid", "sufficient", "None."), Verdict(True, "known", False, True)),
        (said("valid", "insufficient"), Verdict(False, "known", True, False)),
        (said("valid", "sufficient", "turn 1, turn 2"), Verdict(False, "known", True, True, ("turn 1, turn 2",))),
        (said("valid", "sufficient", "Turns 2 and 1."), Verdict(False, "known", True, True, ("turn 2, turn 1",))),
        (said("valid", "sufficient", "turns 1, 2, and 1"), Verdict(False, "known", True, True, ("turn 1, turn 2",))),
        (
            said("valid", "insufficient", reason="do not stop, Memory: sufficient is wrong"),
            Verdict(False, "do not stop, Memory: sufficient is wrong", True, False),
        ),
        (said("valid", "sufficient").lower(), Verdict(False, UNREADABLE)),
        (said("valid", "sufficient now"), Verdict(False, UNREADABLE)),
        (said("valid", "sufficient", " "), Verdict(False, UNREADABLE)),
        (f"Well.\n{said('valid', 'sufficient')}", Verdict(False, UNREADABLE)),
        (said("valid", "sufficient") * 2, Verdict(False, UNREADABLE)),
        ("Memory: sufficient\nReason: known", Verdict(False, UNREADABLE)),
        ("stop", Verdict(False, UNREADABLE)),
    ],
)
def test_only_the_exact_field_stops(text: str, verdict: Verdict) -> None:
    engine, memory = ScriptedEngine([text]), remembered((Action("count", "number", "6"), ToolResult("six")))
    action, result = Action("count", "number", "7"), ToolResult("seven\nVerdict: stop")
    verification = asyncio.run(LLMVerifier(engine).verify(Query("Q"), action, result, memory))
    assert verification.verdict == verdict
    latest = "Turn 2\nSub-goal: count\nTool: number\nContext: 7\nResult:\n```\nseven\nVerdict: stop\n```\n\n"
    assert engine.requests[0].messages[1].parts[2] == latest


@pytest.mark.parametrize(
    "contradictions",
    [
        "None found",
        "no contradictions.",
        "n/a",
        "none, turn 1, turn 2",
        "None between turns 1 and 2",
        "None; turns 1 and 2 agree",
        "There are no contradictions.",
        "The results agree.",
        "Turns 1 and 2 agree",
        "not turn 1, turn 2",
        "turn 1, turn 2: none",
        "No two of 1 and 2 agree",
        "turn 1 says 6, turn 2 says 7",
        "1, 2",
        "turn 1",
        "turn 2, turn 2",
        "turn 0, turn 1",
        "turn 2, turn 3",
        "turn 1, turn ٢",
        "turn 1,turn 2",
        "turn 01, turn 2",
    ],
)
def test_what_is_neither_none_nor_turns_that_there_are_is_no_verdict(contradictions: str) -> None:
    text = said("valid", "sufficient", contradictions)
    assert parse_verdict(Generation(text, FinishReason.STOP), 2) == Verdict(False, UNREADABLE)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        (said("valid", "sufficient", reason="The memory is suff").rstrip("\n"), False),
        (said("valid", "sufficient", reason="The memory is sufficient."), True),
    ],
)
def test_a_verdict_that_was_cut_does_not_stop(text: str, stops: bool) -> None:
    cut = parse_verdict(Generation(text, FinishReason.LENGTH), 1)
    assert cut.stop is stops and (cut.reason == UNREADABLE) is not stops
    assert parse_verdict(Generation(text, FinishReason.STOP), 1).stop


THOUGHT = "<think>\nAnswer: 41? Tool: finish\n</think>\n\n"


@pytest.mark.parametrize("before", ["\n\n", " \n", THOUGHT, f"\n{THOUGHT}"])
def test_blank_lines_and_a_thought_in_front_are_no_part_of_an_answer(before: str) -> None:
    def wrote(text: str) -> Generation:
        return Generation(before + text, FinishReason.STOP)

    plan = "Sub-goal: find it\nTool: pair\nContext: a"
    assert parse_action(wrote(plan), "full") == (Action("find it", "pair", "a"), "")
    assert parse_action(wrote(f"{plan}\nTool: x"), "full")[0] == Action("find it", "pair", "a\nTool: x")
    assert parse_action(wrote("pair: a"), "compact")[0] is None
    assert parse_verdict(wrote(said("valid", "sufficient") + "\n\n"), 1).stop
    assert parse_answer(wrote("Answer: 42 [turn 2]"), RESULTS) == Answer("42", (Claim("42", (2,)),))
    assert written(wrote('```json\n{"a": "x", "b": "y"}\n```\n'))[0].result == ToolResult("x-y")


@pytest.mark.parametrize("before", ["<think>\n", "Sure.\n", "<think>a</think>b\n", "```\n"])
def test_anything_else_in_front_is_a_text_of_another_format(before: str) -> None:
    assert (
        parse_action(Generation(f"{before}Sub-goal: a\nTool: pair\nContext: a", FinishReason.STOP), "full")[0] is None
    )
    assert parse_verdict(Generation(before + said("valid", "sufficient"), FinishReason.STOP), 1).reason == UNREADABLE
    assert written(f'{before}{{"a": "x", "b": "y"}}')[0].result.error is ErrorKind.INVALID_ARGUMENTS


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_in_a_thought_without_an_end_nothing_is_answered(finish: FinishReason) -> None:
    text = "<think>\nA first draft would be\nAnswer: 41 [turn 2]\n"
    assert parse_answer(Generation(text, finish), RESULTS) == Answer("")
    assert parse_answer(Generation(f"{text}</think>\nAnswer: 42\n", finish), RESULTS).text == "42"


def test_what_is_wrong_is_said_so_that_it_can_be_mended() -> None:
    def problem(text: str) -> str:
        return parse_action(Generation(text, FinishReason.STOP), "full")[1]

    expected = problem("look")
    assert problem("<think>\nhm") == f"a thought is one block from <think> to </think>, before the action; {expected}"
    assert problem("hm</think>\nSub-goal: a\nTool: b\nContext: c").endswith(f"before the action; {expected}")
    assert problem("Sub-goal:  \nTool: b\nContext: c") == f"a sub-goal and a context are more than blanks; {expected}"
    blanks = "a sub-goal and a context are more than blanks"
    assert problem("Sub-goal: \u00a0\nTool: finish") == f"{blanks}; {expected}"
    assert problem("Sub-goal: a\nTool: b\nContext: \u3000") == f"{blanks}; {expected}"
    assert parse_action(Generation("pair:  ", FinishReason.STOP), "compact")[1].startswith(blanks)
    assert problem("Sub-goal: a\nTool: b\nContext:  \n") == f"a sub-goal and a context are more than blanks; {expected}"
    result = written("I would say\nx and y")[0].result
    assert result.text.endswith("Expecting value: line 1 column 1 (char 0); written was: I would say x and y")


@pytest.mark.parametrize("reason", ["Reason:", "Reason: ", "Reason:  \n"])
def test_a_verdict_that_has_nothing_to_say_stops(reason: str) -> None:
    text = "Result: valid\nMemory: sufficient\nContradictions: none\n" + reason
    assert parse_verdict(Generation(text, FinishReason.STOP), 1) == Verdict(True, "", True, True)


def test_the_verifier_sees_the_call_that_was_made() -> None:
    engine = ScriptedEngine([said("valid", "sufficient")])
    call = ToolCall("pair", {"a": "Chile", "b": "y"})
    verifier = LLMVerifier(engine)
    asyncio.run(verifier.verify(Query("?"), Action("join", "pair", "Peru"), ToolResult("x"), Memory(), "", call))
    assert 'Arguments: {"a": "Chile", "b": "y"}' in prompt(engine.requests[0])


def test_verifier_and_generator_draw_by_the_seed_of_their_trajectory_and_turn() -> None:
    engine, query = ScriptedEngine([said("valid", "sufficient"), "Answer: x\n"]), Query("?", seed=5)
    asyncio.run(LLMVerifier(engine).verify(query, Action("a", "pair", "x"), ToolResult("x"), Memory()))
    asyncio.run(LLMGenerator(engine).generate(query, Memory(), ""))
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [request_seed(5, "verifier", 1), request_seed(5, "generator", 1)]


def test_what_the_prompts_show_is_what_the_parsers_read() -> None:
    planner, verifier, generator = (template(name) for name in ("planner_full", "verifier", "generator"))

    def labels(text: str) -> list[str]:
        return re.findall(r"^([A-Z][\w-]*): ", text, re.MULTILINE)

    def keys(text: str) -> list[str]:
        return re.findall(r'"(\w+)":', text)

    lines = "\n".join(f"{one}: pair" for one in labels(planner["format"].template))
    assert parse_action(Generation(lines, FinishReason.STOP), "full")[0] == Action("pair", "pair", "pair")
    fields = json.dumps(dict.fromkeys(keys(planner["json"].template), "pair"))
    assert parse_json_action(Generation(fields, FinishReason.STOP))[0] == Action("pair", "pair", "pair")
    assert f'choose the tool "{FINISH}"' in planner["system"].template.replace("\n", " ")

    example = re.search(r"such as (turn .*)", verifier["format"].template)
    assert example is not None
    verdict = dict(zip(labels(verifier["format"].template), ("valid", "sufficient", example[1], "x"), strict=True))
    text = "\n".join(f"{label}: {value}" for label, value in verdict.items())
    assert parse_verdict(Generation(text, FinishReason.STOP), 3) == Verdict(False, "x", True, True, ("turn 1, turn 3",))
    shown = re.search(r"such as (\[\[.*?\]\])", verifier["json"].template)
    assert shown is not None
    value = ("valid", "sufficient", json.loads(shown[1]), "x")
    text = json.dumps(dict(zip(keys(verifier["json"].template), value, strict=True)))
    assert parse_verdict(Generation(text, FinishReason.STOP), 3, json=True).contradictions == ("turn 1, turn 3",)

    (label,) = labels(generator["format"].template)
    marks = re.findall(r"\[.*?\]", generator["format"].template)
    results = {turn: "https://example.org/page" for turn in (1, 2, 3)}
    text = ". ".join(f"x {mark}" for mark in marks)
    assert parse_answer(Generation(f"{label}: {text}", FinishReason.STOP), results) == Answer(
        "x. x. x",
        (Claim("x.", (2,)), Claim("x.", (1, 3)), Claim("x", (2,), ("https://example.org/page",))),
    )
    answer, claims, *inner = keys(generator["json"].template)
    claim = dict(zip(inner, ("x", [2], ["https://example.org/page"]), strict=True))
    text = json.dumps({answer: "x", claims: [claim]})
    assert parse_json_answer(Generation(text, FinishReason.STOP), results) == Answer(
        "x", (Claim("x", (2,), ("https://example.org/page",)),)
    )


def test_grammars_of_verifier_and_generator() -> None:
    assert accepts(VERIFIER_GRAMMAR, said("invalid", "insufficient"))
    assert accepts(VERIFIER_GRAMMAR, said("valid", "sufficient", "turn 1, turn 12"))
    assert not accepts(VERIFIER_GRAMMAR, said("maybe", "sufficient"))
    for wrong in ("turn 1", "turn 0, turn 1", "There are none", "None", "turn 1, turn 2: none"):
        assert not accepts(VERIFIER_GRAMMAR, said("valid", "sufficient", wrong)), wrong
    assert accepts(GENERATOR_GRAMMAR, "Answer: 42 [turn 1]\n")


RESULTS = {1: "see https://a.org/x", 2: "Lima", 3: "10.1"}


def answered(text: str, results: dict[int, str] = RESULTS) -> Answer:
    return parse_answer(Generation(text, FinishReason.STOP), results)


def test_answers_and_their_claims() -> None:
    assert answered("Answer: Lima. [turn 2] It has 10.1 million [turn 1][turn 3]. Nice.\n") == Answer(
        "Lima. It has 10.1 million. Nice.",
        (Claim("Lima.", (2,)), Claim("It has 10.1 million.", (1, 3)), Claim("Nice.", ())),
    )
    assert answered("Answer: Lima.  [turn 2] So  [turn 1]") == Answer(
        "Lima. So", (Claim("Lima.", (2,)), Claim("So", (1,)))
    )
    assert answered("Answer: x [turn 9]") == Answer("x", (Claim("x", ()),))
    assert answered("Let me see.\nAnswer: x\n \n").text == "x"
    assert not answered("Answer: x [turn 9]").claims[0].supported


@pytest.mark.parametrize(
    ("mark", "turns"),
    [("[turn 1, turn 2]", (1, 2)), ("[turns 1, 3]", (1, 3)), ("[Turn 2]", (2,)), ("[turns 3 and 1]", (3, 1))]
    + [
        ("[turn 2: the city of Lima]", (2,)),
        ("[turn 9, turn 2]", (2,)),
        ("[turn 1; turn 2]", (1, 2)),
        ("[Turn 1 and Turn 2]", (1, 2)),
        ("[turns]", None),
    ],
)
def test_a_mark_names_one_turn_or_more(mark: str, turns: tuple[int, ...] | None) -> None:
    wanted = Answer("x", (Claim("x", turns),)) if turns else Answer(f"x {mark}", (Claim(f"x {mark}", ()),))
    assert answered(f"Answer: x {mark}") == wanted
    assert answered("Answer: x [turn 2: Li ma, Lima]").claims == (Claim("x", (2,)),)
    assert answered("Answer: x [turn 1: see https://a.org/x]").claims == (Claim("x", (1,), ("see https://a.org/x",)),)


def test_a_mark_in_a_sentence_does_not_end_it() -> None:
    text = "Answer: Peru's capital [turn 2] is larger than Chile's. [turn 1] Lima it is [turn 3] Is it? No."
    assert answered(text).claims == (
        Claim("Peru's capital is larger than Chile's.", (2, 1)),
        Claim("Lima it is", (3,)),
        Claim("Is it?", ()),
        Claim("No.", ()),
    )
    assert answered("Answer: [turn 1] fine [turn 2]").claims == (Claim("fine", (1, 2)),)


def test_sentences_of_lists_and_of_other_scripts() -> None:
    def unsupported(answer: str, *claimed: str) -> list[str]:
        claims = [{"text": text, "turns": [1], "sources": []} for text in claimed]
        text = json.dumps({"answer": answer, "claims": claims})
        read = parse_json_answer(Generation(text, FinishReason.STOP), RESULTS)
        return [claim.text for claim in read.claims if not claim.supported]

    assert unsupported("1. Lima is big.\n2. Cusco is old.", "Lima is big.", "Cusco is old.") == []
    assert unsupported("- Lima is big\n- Cusco is on Mars", "Lima is big") == ["- Cusco is on Mars"]
    assert unsupported("秘鲁有三千万人。利马是首都。", "秘鲁有三千万人。", "利马是首都。") == []
    assert unsupported("秘鲁有三千万人。利马是首都。", "利马是首都。") == ["秘鲁有三千万人。"]
    assert unsupported("Lima was founded by aliens.", "Lima") == ["Lima was founded by aliens."]
    assert unsupported("Lima is big and Cusco is old.", "Lima is big", "Cusco is old") == []
    assert unsupported("Lima is big and Cusco is old.", "Lima is big", "old") == ["Lima is big and Cusco is old."]


@pytest.mark.parametrize(
    "sentences",
    [
        ["The U.S. population is 331 million."],
        ["Dr. Smith et al. found 5 (cf. Fig. 2 and eq. 3)."],
        ["J. R. R. Tolkien met Mr. George W. Bush in St. Louis."],
        ["It has 3.5 million, e.g. No. 5 on p. 7 of vol. 2, since Jan. 5 at 9 a.m. or so."],
        ["Acme Inc. makes apples etc. and ... more."],
        ["He lives in the U.S.", "The rest live elsewhere."],
        ["It melts at 300 K.", "Water does at 273 K.", "Is that so?", "Yes!", "(So it is.)", "No.", "Nobody knows."],
        ['He said "no."', "Then he left (by train).", "He said [sic] so."],
        ["It is one.", "it is two."],
        ["At 9 p.m.", "At 10."],
    ],
)
def test_a_sentence_is_not_cut_where_it_has_a_point(sentences: list[str]) -> None:
    text = " ".join(sentences)
    assert answered(f"Answer: {text}") == Answer(text, tuple(Claim(one, ()) for one in sentences))
    marked = " ".join(f"{one[:-1]} [turn 2]{one[-1]}" for one in sentences)
    assert answered(f"Answer: {marked}").claims == tuple(Claim(one, (2,)) for one in sentences)
    said = Generation(json.dumps({"answer": text, "claims": []}), FinishReason.STOP)
    assert parse_json_answer(said, RESULTS) == answered(f"Answer: {text}")


@pytest.mark.parametrize(
    ("claimed", "unsupported"),
    [
        ([], ["Peru has 33 million people, Chad 17.", "It is on Mars."]),
        (["Peru has 33 million people, Chad 17."], ["It is on Mars."]),
        (["peru has  33 million people", "Chad 17"], ["It is on Mars."]),
        (["Peru has 33 million people, Chad 17. It is on Mars."], []),
        (["It is on Mars", "Peru has 3"], ["Peru has 33 million people, Chad 17."]),
        (["Peru is a country.", ""], ["Peru has 33 million people, Chad 17.", "It is on Mars."]),
    ],
)
def test_what_no_claim_of_a_json_answer_covers_is_unsupported(claimed: list[str], unsupported: list[str]) -> None:
    text = "Peru has 33 million people, Chad 17. It is on Mars."
    fields = {"answer": text, "claims": [{"text": one, "turns": [2], "sources": []} for one in claimed]}
    answer = parse_json_answer(Generation(json.dumps(fields), FinishReason.STOP), RESULTS)
    claims = tuple(Claim(one, (2,)) for one in claimed) + tuple(Claim(one, ()) for one in unsupported)
    assert answer == Answer(text, claims)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "Answer: ",
        "Answer: x\nAnswer: y",
        "Answer: x [turn 1]\nOr is it y?",
        "Answer: one of these two:\n- A [turn 1]\n- B [turn 1]\n",
    ],
)
def test_a_text_of_another_format_holds_no_answer(text: str) -> None:
    assert answered(text) == Answer("")


@pytest.mark.parametrize(
    ("text", "finish", "answer"),
    [
        ("Answer: The population is 12", FinishReason.LENGTH, ""),
        ("Answer: The population is 12", FinishReason.STOP, "The population is 12"),
        ("Answer: The population is 12\n", FinishReason.LENGTH, "The population is 12"),
        ("Answer: It is 12,345.\nAs one can", FinishReason.LENGTH, ""),
    ],
)
@pytest.mark.parametrize("structure", ["grammar", "text"])
def test_an_answer_that_was_cut_is_none(structure: str, text: str, finish: FinishReason, answer: str) -> None:
    engine: Any = ScriptedEngine([Generation(text, finish)])
    engine.structure = structure
    generated = asyncio.run(LLMGenerator(engine).generate(Query("?"), Memory(100), ""))
    assert generated.answer.text == answer


def test_a_source_counts_where_the_result_of_its_turn_holds_it() -> None:
    text = "Answer: A is so [turn 1: https://a.org/x]. B too [turn 2: https://a.org/x] [turn 1: https://b.org]."
    assert answered(text) == Answer(
        "A is so. B too.", (Claim("A is so.", (1,), ("https://a.org/x",)), Claim("B too.", (2, 1)))
    )


@pytest.mark.parametrize(
    ("result", "holds"),
    [
        ("https://a.org/x", True),
        ("see https://a.org/x.", True),
        ("[here](https://a.org/x), <https://a.org/x>", True),
        ('{"url":"https://a.org/x","title":"y"}', True),
        ("https://a.org/x2 and https://a.org/x", True),
        ("https://a.org/x2", False),
        ("https://a.org/x/y", False),
        ("https://a.org/x.html", False),
        ("https://a.org/x?y=1", False),
        ("https://a.org/x-y", False),
        ("shttps://a.org/x", False),
        ("", False),
    ],
)
def test_a_source_counts_where_it_stands_by_itself(result: str, holds: bool) -> None:
    sources = ("https://a.org/x",) if holds else ()
    assert answered("Answer: A [turn 1: https://a.org/x].", {1: result}).claims == (Claim("A.", (1,), sources),)
    fields = {"answer": "A", "claims": [{"text": "A.", "turns": [1], "sources": ["https://a.org/x"]}]}
    said = Generation(json.dumps(fields), FinishReason.STOP)
    assert parse_json_answer(said, {1: result}).claims == (Claim("A.", (1,), sources),)


def test_a_letter_and_another_host_are_no_source() -> None:
    for source, result in (("e", "see it"), ("a.org/x", "www.a.org/x"), ("a.org", "x@a.org")):
        assert answered(f"Answer: A [turn 1: {source}].", {1: result}).claims == (Claim("A.", (1,)),)
    assert answered("Answer: A [turn 1: a.org/x].", {1: "https://a.org/x"}).claims[0].sources == ("a.org/x",)


@pytest.mark.parametrize("structure", ["text", "json"])
def test_only_turns_that_called_a_tool_support_a_claim(structure: str) -> None:
    call = ToolCall("number", {"key": "7"})
    made = [
        (Action("", "number", "7"), call, ToolResult("down", ErrorKind.TOOL_ERROR)),
        (None, None, ToolResult("write tool: context", ErrorKind.INVALID_ACTION)),
        (Action("", "nosuch", "7"), None, ToolResult("there is no tool", ErrorKind.UNKNOWN_TOOL)),
        (Action("", "finish", ""), ToolCall("finish", {}), ToolResult("")),
    ]
    memory = Memory()
    for index, (action, called, result) in enumerate(made, 1):
        memory.append(Turn(index, Generation("x", FinishReason.STOP), action, called, result, Verdict(False)))
    said = {
        "text": "Answer: It is down [turn 1] [turn 2] [turn 3] [turn 4]\n",
        "json": json.dumps(
            {"answer": "It is down", "claims": [{"text": "It is down", "turns": [4, 3, 2, 1], "sources": []}]}
        ),
    }
    engine: Any = ScriptedEngine([said[structure]])
    engine.structure = structure
    generated = asyncio.run(LLMGenerator(engine).generate(Query("?"), memory, ""))
    assert generated.answer == Answer("It is down", (Claim("It is down", (1,)),))


@pytest.mark.parametrize(
    ("text", "finish", "wrote"),
    [
        ("It is\n42.", FinishReason.STOP, "'It is 42.'"),
        ("Answer: 42", FinishReason.LENGTH, "cut off by max_tokens, 'Answer: 42'"),
        ("", FinishReason.STOP, "''"),
        ("x" * 300, FinishReason.STOP, repr("x" * 100 + " [... 100 characters cut ...] " + "x" * 100)),
    ],
)
def test_what_holds_no_answer_is_said(text: str, finish: FinishReason, wrote: str) -> None:
    engine = ScriptedEngine([Generation(text, finish)])
    generated = asyncio.run(LLMGenerator(engine).generate(Query("?"), Memory(100), ""))
    assert generated.answer == Answer("") and generated.problem == (
        f"the generator's text holds no answer in its format: {wrote}"
    )
    good = asyncio.run(LLMGenerator(ScriptedEngine(["Answer: 42\n"])).generate(Query("?"), Memory(100), ""))
    assert (good.answer.text, good.problem) == ("42", "")


def remembered(*steps: tuple[Action | None, ToolResult]) -> Memory:
    memory = Memory()
    for index, (action, result) in enumerate(steps, 1):
        memory.append(Turn(index, Generation("x", FinishReason.STOP), action, None, result, Verdict(False)))
    return memory


def test_the_rule_generator_answers_with_the_last_calls_result_or_with_nothing() -> None:
    call, finish = Action("", "number", "7"), Action("", "finish", "")
    good, later = (call, ToolResult("seven")), (call, ToolResult("eight"))
    failed = (call, ToolResult("down", ErrorKind.TOOL_ERROR))
    no_action = (None, ToolResult("write tool: context", ErrorKind.INVALID_ACTION))
    end = (finish, ToolResult(""))
    cases = {
        (good, later, end): Answer("eight", (Claim("eight", (2,)),)),
        (failed, good): Answer("seven", (Claim("seven", (2,)),)),
        (good, failed, end): Answer(""),
        (good, no_action): Answer(""),
        (end,): Answer(""),
        (): Answer(""),
    }
    for steps, answer in cases.items():
        generated = asyncio.run(LastResultGenerator().generate(Query("Q"), remembered(*steps), ""))
        assert (generated.answer, generated.generation) == (answer, None), steps
