"""Keys that the recipe names are in nothing that a tool says, whichever tool it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from midflight.building import toolset_of
from midflight.cli import run
from midflight.recipe import load_recipe
from midflight.redacting import redact_cut
from midflight.tools import (
    ErrorKind,
    InfrastructureError,
    Scope,
    ToolResult,
    Toolset,
    TransientError,
    make_toolset,
    tool,
)
from midflight.tools.hiding import HidingTool
from midflight.tools.options import SERVICE_KEYS
from midflight.tools.web.providers import PROVIDERS
from tests.recipe.test_config import MINIMAL

KEYS = {"MY_KEY": "sk-very-secret-0123456789", "SHOP_TOKEN": "Bearer shop-5ecret", "TAVILY_API_KEY": "tvly-5ecret-1"}
PARTS = (*KEYS.values(), "shop-5ecret")
ENGINES = """
engines:
  strong: {provider: openai, model: m, base_url: "http://127.0.0.1:1/v1", key_variable: MY_KEY}
"""
OWN = '''
import os
from midflight.tools import tool, InfrastructureError, ToolError, TransientError

@tool
def leak(variable: str, how: str) -> str:
    """What a variable holds."""
    text = os.environ[variable]
    if how == "error":
        raise ValueError("key is " + text)
    if how == "tool":
        raise ToolError("key is " + text)
    if how == "down":
        raise InfrastructureError("key is " + text)
    if how == "busy":
        raise TransientError("busy", so_far="key is " + text)
    return "key is " + text + " " + "x" * 300
'''


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(OWN)
    file = tmp_path / "own.yaml"
    text = MINIMAL.replace("[calculator]", "['mine.py:leak']") + ENGINES
    file.write_text(text.replace("verifier: {kind: rule}", "verifier: {kind: llm, engine: strong}"))
    return file


def call(toolset: Toolset, **arguments: str) -> ToolResult:
    async def called() -> ToolResult:
        async with Scope() as scope:
            found = toolset.scoped(scope).get("leak")
            assert found is not None
            return await found.call(arguments, 5.0)

    return asyncio.run(called())


def test_neither_results_nor_errors_nor_the_cache_have_a_key(recipe: Path, tmp_path: Path) -> None:
    limits = "agent.tool_options.leak={cache_hours: 1, result_characters: 200, max_calls: 9}"
    toolset = toolset_of(load_recipe(str(recipe), [limits], training=False))
    for variable in ("MY_KEY", "TAVILY_API_KEY"):
        found = call(toolset, variable=variable, how="text")
        assert found.whole == "key is [key] " + "x" * 300 and found.text.startswith("key is [key] xxx")
        assert call(toolset, variable=variable, how="text") == found  # from the cache
        error = ToolResult("ValueError: key is [key]", ErrorKind.TOOL_ERROR)
        assert call(toolset, variable=variable, how="error") == error
        assert call(toolset, variable=variable, how="tool").text == "key is [key]"
        with pytest.raises(InfrastructureError) as caught:
            call(toolset, variable=variable, how="down")
        assert str(caught.value) == "key is [key]" and caught.value.args == ("key is [key]",)
        assert call(toolset, variable=variable, how="busy") == ToolResult("key is [key]")
    kept = [file.read_text() for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert len(kept) == 2 and not any(part in text for part in PARTS for text in kept)


def test_tools_run_hides_what_the_recipe_names(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for how in ("text", "error", "down"):
        run(["tools", "run", "leak", "variable=MY_KEY", f"how={how}", "--recipe", str(recipe)])
        printed = capsys.readouterr()
        assert "key is [key]" in printed.out + printed.err and KEYS["MY_KEY"] not in printed.out + printed.err


def test_a_servers_variables_are_hidden_in_other_tools_too(recipe: Path) -> None:
    server = "agent.mcp_servers={shop: {url: 'http://127.0.0.1:1/mcp', headers: {Authorization: SHOP_TOKEN}}}"
    from midflight.building import context_of

    context = context_of(load_recipe(str(recipe), [server], training=False), lambda _: None)
    assert context.keys == (KEYS["MY_KEY"], KEYS["SHOP_TOKEN"], "shop-5ecret")
    toolset = make_toolset([f"{recipe.parent}/mine.py:leak"], context=context)
    assert call(toolset, variable="SHOP_TOKEN", how="tool").text == "key is [key]"


def test_without_keys_a_tool_is_itself_and_short_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    @tool
    def echo(text: str) -> str:
        """Say it."""
        return text

    for name in SERVICE_KEYS:
        monkeypatch.setenv(name, "EMPTY")
    assert make_toolset(["echo"], given=[echo]).get("echo") is echo
    assert {provider.variable for provider in PROVIDERS.values()} == {*SERVICE_KEYS, ""}


def test_a_description_and_a_retry_after_are_kept_but_for_the_key() -> None:
    class Busy:
        name, description = "busy", "Sends sk-0123456789 along."
        parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"default": "sk-0123456789"}}}

        async def call(self, arguments: Any, seconds: float) -> ToolResult:
            raise TransientError("sk-0123456789 is busy", retry_after=3.0)

    busy = HidingTool(Busy(), ["sk-0123456789"])
    assert busy.description == "Sends [key] along." and busy.parameters["properties"] == {"a": {"default": "[key]"}}
    with pytest.raises(TransientError, match=r"^\[key\] is busy$") as caught:
        asyncio.run(busy.call({}, 1.0))
    assert caught.value.retry_after == 3.0


def test_the_beginning_of_a_key_before_a_cut_is_hidden() -> None:
    key = "sk-0123456789"
    for length in range(len(key) + 1):
        expected = f"a {key[:length]}..." if length < 4 else "a [key]..."
        assert redact_cut(f"a {key[:length]}...", [key]) == expected
    assert redact_cut("a sk-0123", [key]) == "a sk-0123"


def test_the_whole_text_that_a_tool_brings_itself_is_hidden_too() -> None:
    class Brings:
        name, description = "brings", "a part of a text"
        parameters: dict[str, Any] = {"type": "object"}

        async def call(self, arguments: Any, seconds: float) -> ToolResult:
            return ToolResult(f"part {PARTS[0]}", whole=f"all {PARTS[0]} of it")

    found = asyncio.run(HidingTool(Brings(), PARTS).call({}, 5.0))
    assert found == ToolResult("part [key]", whole="all [key] of it")
