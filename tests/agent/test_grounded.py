"""Grounded arguments: what the grammar lets through, and what `#n` becomes."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from midflight.agent import Action, ErrorKind, Memory, Query, StopReason, ToolResult, Turn, Verdict, planner_grammar
from midflight.agent.actions import ReferenceNotFound, resolve
from midflight.engines.base import FinishReason, Generation
from midflight.tools import make_toolset
from midflight.tools.base import FINISH, Toolset
from tests.agent.doubles import LookupTool, compact_flow, population
from tests.agent.test_planner import accepts

QUESTION = "How many people live in St. John's, Peru and the Solomon Islands: 12 or 3.5?"
TOOLS = Toolset(
    [*(tool for tool in make_toolset(["population", "calculator"]) if tool.name != FINISH), LookupTool("note", {})]
)


def turn(index: int, text: str, error: ErrorKind | None = None) -> Turn:
    action, said = Action("", "t", "x"), Generation("t: x", FinishReason.STOP)
    return Turn(index, said, action, None, ToolResult(text, error), Verdict(stop=False), 0.0, ())


TURNS = [turn(1, "32933835"), turn(2, "no such country", ErrorKind.TOOL_ERROR), turn(3, "Ghana"), turn(4, "-4.5")]


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (" population: Peru\n", True),
        (" population: the Solomon Islands\n", True),
        (" population: St. John's\n", True),
        (" population: #3\n", True),  # a name
        (" population: #1\n", False),  # a number is no name
        (" population: #2\n", False),  # an error is no result
        (" population: #5\n", False),
        (" population: Chad\n", False),
        (" population: Solomon\n", True),
        (" population: olomon\n", False),
        (" population: #3 Peru\n", False),
        (" population: Peru and\n", True),
        (" population: Peru \n", False),
        (" calculator: #1 / #4\n", True),
        (" calculator: abs(#1 - 12) * 3.5\n", True),
        (" calculator: #3 + 12\n", False),
        (" calculator: 13\n", False),
        (" calculator: 1212\n", False),
        (" calculator: 12#1\n", False),
        (" calculator: ()\n", False),
        (" note: #1\n", True),
        (" note: 12 or 3.5\n", True),
        (" note: 13\n", False),
        (" finish\n", True),
    ],
)
def test_grounded_arguments(text: str, accepted: bool) -> None:
    grammar = planner_grammar(TOOLS, "compact", QUESTION, TURNS)
    assert accepts(grammar, text) is accepted
    if accepted and "#" in text:
        assert "#" not in resolve(text, TURNS)


@pytest.mark.parametrize(
    ("question", "expression", "accepted"),
    [
        ("What is 1,234,567 + 1?", "1234567 + 1", True),
        ("What is 1,234,567 + 1?", "567 + 1", False),
        ("What is .5 * 4?", "0.5 * 4", True),
        ("The mean of 12.50 and -3?", "12.50 + -3", True),
        ("The mean of 12.50 and -3?", "12.50 / 2", False),
    ],
)
def test_numbers_of_the_question(question: str, expression: str, accepted: bool) -> None:
    assert accepts(planner_grammar(TOOLS, "compact", question), f" calculator: {expression}\n") is accepted


@pytest.mark.parametrize("pattern", [r"^[\d+*/ -]{1,80}$", "^[0-9+]{1,9}$"])
def test_an_expression_under_any_class_can_name_a_result(pattern: str) -> None:
    tools = Toolset([LookupTool("sum", {}, schema={"type": "string", "pattern": pattern})])
    fits = pattern.startswith(r"^[\d")
    assert accepts(planner_grammar(tools, "compact", "12?", TURNS), " sum: 12+#1\n") is fits
    assert accepts(planner_grammar(tools, "compact", "12?", TURNS), " sum: #1\n")


def test_words_under_a_pattern_that_numbers_fit_too_are_quoted() -> None:
    tools = Toolset([LookupTool("wiki", {}, schema={"type": "string", "pattern": "^[A-Za-z0-9 ]{1,40}$"})])
    assert accepts(planner_grammar(tools, "compact", "Who wrote Dune?"), " wiki: Dune\n")
    grammar = planner_grammar(tools, "compact", "Who wrote Dune 2?")
    assert accepts(grammar, " wiki: Dune 2\n") and not accepts(grammar, " wiki: Chad 2\n")


def test_a_quote_holds_no_reference() -> None:
    grammar = planner_grammar(TOOLS, "compact", "Who sang song #1 first?", TURNS)
    assert accepts(grammar, " note: song\n") and accepts(grammar, " note: #1\n")
    assert not accepts(grammar, " note: song #1\n")
    assert not accepts(grammar, " note: song #1 first\n")


@pytest.mark.parametrize("question", ["384 * 27 + 15", "Сколько людей живёт в Перу?", "?", ""])
def test_a_tool_that_could_be_given_nothing_is_not_offered(question: str) -> None:
    names = Toolset([tool for tool in TOOLS if tool.name == "population"])
    assert planner_grammar(names, "compact", question).splitlines()[1] == 'call: "finish"'


def test_a_calculator_without_numbers_is_not_offered() -> None:
    grammar = planner_grammar(TOOLS, "compact", "Who is it?", [])
    assert not accepts(grammar, " calculator: 1\n")
    assert accepts(grammar, " population: it\n")
    assert accepts(planner_grammar(TOOLS, "compact", 'a "b\\n" c', []), ' note: "b\\n"\n')


@pytest.mark.parametrize(
    ("context", "resolved"),
    [
        ("#1 - #4", "32933835 - (-4.5)"),
        ("#4", "-4.5"),
        ("#3 2", "(Ghana) 2"),
        ("#3", "Ghana"),
        ("no reference", "no reference"),
    ],
)
def test_references_become_results(context: str, resolved: str) -> None:
    assert resolve(context, TURNS) == resolved


@pytest.mark.parametrize("context", ["#2", "#5 + 1", "#0"])
def test_a_reference_to_nothing_is_named(context: str) -> None:
    with pytest.raises(ReferenceNotFound, match=r"#\d refers to no result; turns with one: #1, #3, #4"):
        resolve(context, TURNS)


@pytest.mark.parametrize("digits", ["1" * 5000, "0" * 4999 + "1", "0000000001"])
def test_no_number_is_too_long_to_be_named(digits: str) -> None:
    with pytest.raises(ReferenceNotFound) as caught:
        resolve(f"#{digits}", TURNS)
    assert str(caught.value) == f"#{digits[:39]} refers to no result; turns with one: #1, #3, #4"


def run(script: Sequence[str], grounded: bool, *tools: LookupTool) -> list[Turn]:
    flow, _ = compact_flow(list(script), *tools, grounded=grounded)
    trajectory = asyncio.run(flow.run(Query("?")))
    assert trajectory.stop_reason is StopReason.FINISHED
    return list(trajectory.turns)


def test_the_call_gets_the_result_and_memory_keeps_the_reference() -> None:
    note = LookupTool("note", {"32933835": "found"})
    first, second, _ = run(["population: Peru", "note: #1", "finish"], True, population(), note)
    assert note.calls == [{"key": "32933835"}]
    assert second.action == Action("", "note", "#1") and second.call is not None
    assert dict(second.call.arguments) == {"key": "32933835"}
    memory = Memory()
    for one in (first, second):
        memory.append(one)
    assert memory.parts(512, len, "compact")[1] == "Turn 2: note: #1\nResult: found\n"


def test_a_wrong_reference_is_an_error_the_planner_reads() -> None:
    (wrong, _) = run(["population: #7", "finish"], True)
    assert wrong.result == ToolResult("#7 refers to no result; turns with one: none", ErrorKind.INVALID_ARGUMENTS)
    (literal, _) = run(["population: #7", "finish"], False)
    assert literal.call is not None and json.dumps(dict(literal.call.arguments)) == '{"key": "#7"}'
