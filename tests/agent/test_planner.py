import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.agent import Action, LLMPlanner, Memory, Query, planner_grammar
from midflight.agent.actions import parse_action, refers, render_action
from midflight.agent.prompting import template
from midflight.building import assemble
from midflight.engines.base import FinishReason, Generation, Sampling
from midflight.engines.scripted import ScriptedEngine
from midflight.recipe import load_recipe
from midflight.tools import make_toolset
from midflight.tools.base import Toolset
from tests.agent.doubles import LookupTool, PairTool, population

CALCULATOR = LookupTool("calculator", {}, schema={"type": "string", "pattern": r"^[0-9+\-*/(). ]{1,80}$"})
TOOLSET = Toolset([population(), CALCULATOR, PairTool()])


def parsed(text: str, format: str) -> Action | None:
    action, problem = parse_action(Generation(text, FinishReason.STOP), format)  # type: ignore[arg-type]
    assert (action is None) == ("expected" in problem)
    return action


def test_compact_actions() -> None:
    assert parsed("population: Peru\n", "compact") == Action("", "population", "Peru")
    assert parsed(" population: a: b", "compact") == Action("", "population", "a: b")
    assert parsed("nosuch: x", "compact") == Action("", "nosuch", "x")
    assert parsed(" finish\n", "compact") == Action("", "finish", "")


@pytest.mark.parametrize(
    "text",
    ["", "\n", "Peru", "population", "population:Peru", "population: ", "  population: Peru", "the tool: Peru",
     "population: Peru\nfinish\n", "finish: now", "Finish", "finish now", "population: Peru\n\n"],
)  # fmt: skip
def test_compact_texts_that_are_no_actions(text: str) -> None:
    assert parsed(text, "compact") is None


def test_full_actions() -> None:
    assert parsed("Sub-goal: add\nTool: python\nContext: x = 1\nTool: y\n", "full") == Action(
        "add", "python", "x = 1\nTool: y"
    )
    assert parsed("Sub-goal: done\nTool: finish", "full") == Action("done", "finish", "")
    assert parsed("Sub-goal: done\nTool: finish\nContext: none", "full") == Action("done", "finish", "none")


@pytest.mark.parametrize(
    "text",
    ["Tool: a\nContext: b", "Sub-goal: a\nTool: b c\nContext: d", "Sub-goal: a\nTool: b",
     "I plan.\nSub-goal: a\nTool: b\nContext: c",
     "Sub-goal: a\n\nTool: b\nContext: c", "sub-goal: a\ntool: b\ncontext: c", "Sub-goal: a\nTool: b\nContext: "],
)  # fmt: skip
def test_full_texts_that_are_no_actions(text: str) -> None:
    assert parsed(text, "full") is None


TOOLS = st.from_regex(r"[a-z_]{1,9}", fullmatch=True) | st.just("finish")
TEXTS = st.text(alphabet=st.sampled_from("ab:# \t\r\nTool: finish"), max_size=24) | st.text(max_size=24)


def rendered(action: Action, format: str) -> str | None:
    try:
        return render_action(action, format)  # type: ignore[arg-type]
    except ValueError:
        return None


@given(TEXTS, TOOLS, TEXTS)
def test_what_is_rendered_reads_as_the_action(sub_goal: str, tool: str, context: str) -> None:
    action = Action(sub_goal, tool, context)
    text = rendered(action, "full")
    assert text is None or parsed(text, "full") == action
    single = Action("", tool, "" if tool == "finish" else context)
    text = rendered(action, "compact")
    assert text is None or parsed(text, "compact") == single


@given(TEXTS)
def test_every_action_that_can_be_read_can_be_rendered(text: str) -> None:
    for format, texts in (("compact", (text, f"t: {text}")), ("full", (f"Sub-goal: g\nTool: t\nContext: {text}",))):
        for one in texts:
            action = parse_action(Generation(one, FinishReason.STOP), format)[0]  # type: ignore[arg-type]
            assert action is None or parsed(rendered(action, format) or "", format) == action


def test_actions_are_rendered_as_the_grammar_spells_them() -> None:
    for format in ("compact", "full"):
        for action in (
            Action("count", "population", "Peru"),
            Action("add", "calculator", "1/2"),
            Action("x", "finish", ""),
        ):
            assert accepts(planner_grammar(TOOLSET, format), rendered(action, format) or "")  # type: ignore[arg-type]
    assert render_action(Action("g", "population", "Peru"), "compact") == " population: Peru\n"
    assert render_action(Action("g", "finish", "x"), "compact") == " finish\n"
    assert render_action(Action("g", "finish", ""), "full") == "Sub-goal: g\nTool: finish\n"
    assert render_action(Action("g", "python", "x = 1\ny"), "full") == "Sub-goal: g\nTool: python\nContext: x = 1\ny\n"


@pytest.mark.parametrize(
    ("action", "format", "reason"),
    [
        (Action("", "population", "Peru"), "full", "no sub-goal"),
        (Action("g", "population", "a\nb"), "compact", "line breaks"),
        (Action("g", "population", ""), "compact", "empty"),
        (Action("g", "population", ""), "full", "empty"),
        (Action("g", "a b", "x"), "full", "spaces"),
        (Action("g", "t", "x\n"), "full", "line breaks"),
    ],
)
def test_actions_that_a_format_has_no_text_for(action: Action, format: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_action(action, format)  # type: ignore[arg-type]


def test_a_context_refers_to_results_by_number() -> None:
    assert refers("#1 / 2") and refers("x#12") and not refers("# 1") and not refers("number 1")


def accepts(grammar: str, text: str) -> bool:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert matcher.get_error() == ""
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (" population: Peru\n", True),
        (" population: Côte d'Ivoire\n", True),
        (" population: " + "x" * 60 + "\n", True),
        (" population: " + "x" * 61 + "\n", False),
        (" population:  Peru\n", False),
        (" population: \n", False),
        (" calculator: (1+2)/3\n", True),
        (" calculator: one\n", False),
        (" pair: a b\n", True),
        (" finish\n", True),
        (" finish: x\n", False),
        (" nosuch: x\n", False),
        ("population: Peru\n", False),
    ],
)
def test_compact_grammar(text: str, accepted: bool) -> None:
    assert accepts(planner_grammar(TOOLSET, "compact"), text) is accepted
    if accepted:
        assert parsed(text, "compact") is not None


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("Sub-goal: count\nTool: population\nContext: Peru\n", True),
        ("Sub-goal: sum\nTool: calculator\nContext: 1/2\n", True),
        ("Sub-goal: sum\nTool: calculator\nContext: half\n", False),
        ("Sub-goal: done\nTool: finish\n", True),
        ("Sub-goal: count\nTool: nosuch\nContext: Peru\n", False),
        ("Tool: population\nContext: Peru\n", False),
    ],
)
def test_full_grammar(text: str, accepted: bool) -> None:
    assert accepts(planner_grammar(TOOLSET, "full"), text) is accepted
    if accepted:
        assert parsed(text, "full") is not None


def test_the_grammar_holds_the_real_calculator_to_its_pattern() -> None:
    grammar = planner_grammar(make_toolset(["calculator"]), "compact")
    assert accepts(grammar, " calculator: sqrt(16) / (1 + 2)\n")
    assert not accepts(grammar, " calculator: population of Peru\n")


@pytest.mark.parametrize(
    "pattern", ["^(a|b)$", "^(?=a)[a]+$", "^([a]|b*)+$", "[^x]{1,3}", r"\d+", "[0-9]*", "", r"^[\s]{1,3}$"]
)
def test_other_patterns_fall_back_to_one_line(pattern: str) -> None:
    tool = LookupTool("t", {}, schema={"type": "string", "pattern": pattern})
    assert r"ARGUMENT_0: /[^ \t\r\n][^\r\n]{0,59}/" in planner_grammar(Toolset([tool]), "compact")


def test_slashes_are_escaped_once() -> None:
    tool = LookupTool("t", {}, schema={"type": "string", "pattern": r"[/\/\\/a]+"})
    assert r"ARGUMENT_0: /[\/\/\\\/a]+/" in planner_grammar(Toolset([tool]), "compact")
    assert accepts(planner_grammar(Toolset([tool]), "compact"), " t: a/\\\n")


def test_compact_prompt_and_request() -> None:
    engine = ScriptedEngine(["finish", "finish"])
    planner = LLMPlanner(engine, format="compact", examples="Question: x\nTurn 1: finish")
    asyncio.run(planner.plan(Query("Who?\nTurn 1: finish"), Toolset([population()]), Memory(), 5, ""))
    system, user = engine.requests[0].messages
    assert system.parts[0].endswith(
        "Tools:\npopulation: Population of a country.\nfinish: stop: the question can be answered from what is known\n"
    )
    assert system.parts[1] == "Question: x\nTurn 1: finish\n"
    assert user.parts == ("Question: Who? Turn 1: finish\n", "Turn 1:")
    assert engine.requests[0].grammar == planner_grammar(Toolset([population()]), "compact")
    free = LLMPlanner(engine, format="compact", grammar=False, sampling=Sampling(stop=("###",)))
    asyncio.run(free.plan(Query("Who?"), TOOLSET, Memory(), 5, ""))
    assert (engine.requests[1].grammar, engine.requests[1].sampling.stop) == (None, ("###", "\n"))


def test_full_prompt_tells_schema_and_turns_left() -> None:
    planner = LLMPlanner(ScriptedEngine([]), format="full")
    system, user = planner.messages(Query("Who?"), TOOLSET, Memory(), 3, "")
    assert '- population: Population of a country.\n  parameters: {"additionalProperties": false' in system.parts[0]
    assert user.parts == ("Question: Who?\n", "Turn 1. Turns left, this one included: 3.\nWrite the next action.")
    _, last = planner.messages(Query("Who?"), TOOLSET, Memory(), 1, "")
    assert last.parts[-1].startswith("Turn 1. This is the last turn")


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("llm", "everything from the question and from earlier turns that its call depends on, since whoever"),
        ("direct", "the value of its one required parameter and nothing else, since the tool gets it as you write it."),
    ],
)
def test_the_full_prompt_says_who_reads_a_context(kind: str, context: str) -> None:
    keys = ("agent.planner.format=full", "agent.planner.examples=null", "agent.grounded=false")
    recipe = load_recipe("quickstart", (*keys, f"agent.executor.kind={kind}"))
    engine = ScriptedEngine([])
    flow = assemble(recipe, TOOLSET, engine, engine, training=False)
    assert isinstance(flow.planner, LLMPlanner)
    system, _ = flow.planner.messages(Query("Who?"), TOOLSET, Memory(), 3, "")
    written = system.parts[0].partition("\ncontext that tool needs: ")[2]
    assert written.partition("\n")[0] == context


def test_planners_on_one_toolset_each_have_their_own_instructions() -> None:
    class Json(ScriptedEngine):
        structure = "json"

    toolset = Toolset([population()])
    built_in = "\n".join(f"[{name}]\n{body.template}" for name, body in template("planner_full").items())
    own = built_in.replace("[system]\n", "[system]\nMine.\n", 1)
    planners = [
        LLMPlanner(ScriptedEngine([])),
        LLMPlanner(Json([])),
        LLMPlanner(ScriptedEngine([]), grounded=True),
        LLMPlanner(ScriptedEngine([]), direct=True),
        LLMPlanner(ScriptedEngine([]), prompt=own),
        LLMPlanner(ScriptedEngine([]), format="compact"),
    ]

    def instructions() -> list[str]:
        return [one.messages(Query("Who?"), toolset, Memory(), 3, "")[0].parts[0] for one in planners]

    written = instructions()
    assert len(set(written)) == len(planners) and "one JSON object" in written[1] and written[4].startswith("Mine.")
    again = instructions()
    assert all(one is known for one, known in zip(again, written, strict=True))  # not written again
