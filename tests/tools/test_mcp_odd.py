"""Tools of MCP servers that no toolset can have as they are: they do not take their server with them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.tools import ErrorKind, make_toolset
from midflight.tools.mcp.schemas import readable

pytest.importorskip("mcp")

LIAR = [sys.executable, str(Path(__file__).with_name("mcp_liar.py"))]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
ODD = {
    "a/b": (SCHEMA, "bad tool name 'shop.a/b': use 1 to 64 letters, digits, '_', '-' or '.'"),
    "x" * 60: (SCHEMA, f"bad tool name 'shop.{'x' * 60}': use 1 to 64 letters, digits, '_', '-' or '.'"),
    "sk-secret-1234": (
        {"type": "object", "properties": {"a": {"type": "banana"}}},
        "parameters of tool 'shop.[key]' are not a JSON schema: 'banana' is not valid under any of the given schemas",
    ),
    "names": (
        {"type": "object", "patternProperties": {r"\p{L}": {}}},
        "parameters of tool 'shop.names' are not a JSON schema: '\\\\p{L}' is not a 'regex'",
    ),
    "large": (
        {"type": "object", "patternProperties": {"a{99999999999}": {}}},
        "the repetition number is too large",
    ),
}


def serve(monkeypatch: pytest.MonkeyPatch, fault: str, *names: str) -> dict[str, Any]:
    """The settings of a server that has these of the odd ones, and without a fault one that is not."""
    tools = [{"name": name, "description": "d", "inputSchema": ODD[name][0]} for name in names]
    monkeypatch.setenv("LIAR_TOOLS", json.dumps(tools))
    monkeypatch.setenv("LIAR_KEY", "sk-secret-1234")
    return {"command": [*LIAR, fault], "env": ["LIAR_TOOLS", "LIAR_KEY"]}


def test_odd_tools_are_left_out_with_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    toolset = make_toolset([], servers={"shop": serve(monkeypatch, "", *ODD)})
    toolset.close()
    assert toolset.names == ("shop.go", "finish")
    shown = {name: name.replace("sk-secret-1234", "[key]") for name in ODD}
    lines = [f"agent.mcp_servers.shop: leaves out {shown[name]!r}: {why}" for name, (_, why) in ODD.items()]
    assert capfd.readouterr().err.splitlines() == lines


def test_an_odd_tool_that_is_named_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        make_toolset([], servers={"shop": {**serve(monkeypatch, "", "a/b"), "tools": ["go", "a/b"]}})
    assert str(caught.value) == f"agent.mcp_servers.shop.tools: cannot use 'a/b': {ODD['a/b'][1]}; leave it out"


def test_a_server_that_has_nothing_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        make_toolset([], servers={"shop": serve(monkeypatch, "odd", "a/b")})
    assert str(caught.value) == f"agent.mcp_servers.shop: has no tool that can be used; 'a/b': {ODD['a/b'][1]}"


def test_a_pattern_that_python_cannot_read_is_for_the_server_to_check() -> None:
    odd = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": r"^\p{L}+$", "description": "a name"},
            "year": {"anyOf": [{"type": "string", "pattern": r"^(?<year>\d+)$"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": r"^\d+$"},
            "pattern": {"type": "string", "default": {"pattern": r"\p{L}"}},
        },
    }
    assert readable(odd)["properties"] == {
        "name": {"type": "string", "description": r"a name (matches ^\p{L}+$)"},
        "year": {"anyOf": [{"type": "string", "description": r"(matches ^(?<year>\d+)$)"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": r"^\d+$"},
        "pattern": {"type": "string", "default": {"pattern": r"\p{L}"}},
    }


def test_a_tool_with_such_a_pattern_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^\p{L}+$"}}}
    monkeypatch.setitem(ODD, "letters", (schema, ""))
    toolset = make_toolset([], servers={"shop": serve(monkeypatch, "odd", "letters")})
    toolset.close()
    assert toolset.names == ("shop.letters", "finish") and toolset.validate("shop.letters", {"a": "é"}) is None
    assert toolset.validate("shop.letters", {"a": 3}) == "a: 3 is not of type 'string'"


def test_a_tool_whose_results_break_its_own_schema_does_not_end_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    toolset = make_toolset([], servers={"shop": serve(monkeypatch, "output")})
    go = toolset.get("shop.go")
    assert go is not None
    result = asyncio.run(go.call({}, 20.0))
    toolset.close()
    assert result.error is ErrorKind.TOOL_ERROR
    assert result.text.startswith("RuntimeError: Invalid schema for tool go: '\\\\p{L}' is not a 'regex'")
