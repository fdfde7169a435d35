"""Options and own tools from a recipe: what is right reaches the tool, what is wrong is one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midflight.building import toolset_of
from midflight.errors import UserError
from midflight.recipe import RecipeError, load_recipe
from midflight.tools import BUILTIN, LimitedTool, make_toolset, tool
from tests.recipe.test_config import MINIMAL

OWN = '''\
from midflight.tools import tool

HOW_MANY = 3


@tool
def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


def plain(text: str) -> str:
    """No tool."""
    return text
'''


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe's file with own tools beside it; the current folder is another."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "mine.py").write_text(OWN)
    file = tmp_path / "r.yaml"
    file.write_text(MINIMAL.replace("[calculator]", "[calculator, 'mine.py:shout']"))
    return str(file)


def refused(path: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tool_without_options_is_the_tool_itself() -> None:
    from midflight.tools.calculator import calculator

    assert make_toolset(["calculator"]).get("calculator") is calculator
    assert make_toolset(["calculator"], {"calculator": {}}).get("calculator") is calculator
    limited = make_toolset(["calculator"], {"calculator": {"max_calls": 2}}).get("calculator")
    assert isinstance(limited, LimitedTool) and limited.tool is calculator and limited.options.max_calls == 2


def test_own_tools_are_loaded_beside_the_recipe_and_take_limits(recipe: str, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, ["agent.tool_options.shout.result_characters=200"])
    assert loaded.agent.tools == ("calculator", f"{tmp_path}/mine.py:shout")
    toolset = toolset_of(loaded)
    assert toolset.names == ("calculator", "shout", "finish")
    shout = toolset.get("shout")
    assert isinstance(shout, LimitedTool)
    assert asyncio.run(shout.call({"text": "hey"}, 1.0)).text == "HEY"
    assert len(asyncio.run(shout.call({"text": "x" * 999}, 1.0)).text) <= 200


def test_a_module_that_can_be_imported_gives_tools_as_well(recipe: str) -> None:
    loaded = load_recipe(recipe, ["agent.tools=['midflight.tools.facts.countries:capital']"])
    assert toolset_of(loaded).get("capital") is BUILTIN["capital"].made(BUILTIN["capital"].options_model(), None)  # type: ignore[arg-type]


def test_tools_given_as_objects_take_limits(recipe: str) -> None:
    @tool
    def echo(text: str) -> str:
        """Say it again."""
        return text

    loaded = load_recipe(recipe).model_copy()
    agent = loaded.agent.model_copy(update={"tools": ("echo",), "tool_options": {"echo": {"max_calls": 1}}})
    made = toolset_of(loaded.model_copy(update={"agent": agent}), [echo]).get("echo")
    assert isinstance(made, LimitedTool) and made.tool is echo


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "agent.tool_options.calculator.max_call=2",
            "agent.tool_options.calculator.max_call = 2: unknown key; did you mean "
            "agent.tool_options.calculator.max_calls?",
        ),
        (
            "agent.tool_options.calculator.max_calls=0",
            "agent.tool_options.calculator.max_calls = 0: must be greater than or equal to 1",
        ),
        (
            "agent.tool_options.calculater.max_calls=1",
            "agent.tool_options.calculater: agent.tools does not have it; did you mean calculator? "
            "add it there, or leave this out",
        ),
        *(
            (
                f"agent.tool_options.calculator.{name}=.{value}",
                f"agent.tool_options.calculator.{name} = {value}: must be a finite number",
            )
            for name in ("cache_hours", "seconds", "calls_per_minute")
            for value in ("inf", "nan")
        ),
        (
            "agent.mcp_servers={shop: {command: [x], start_seconds: .inf}}",
            "agent.mcp_servers.shop.start_seconds = inf: must be a finite number",
        ),
        ("agent.tool_options.calculator=3", "agent.tool_options.calculator = 3: must be a section of key: value pairs"),
        (
            "agent.tools=['mine.py:shout']",
            "agent.tools: {work}/mine.py:shout: no such file; paths are relative to the recipe",
        ),
        (
            "agent.tools=['../mine.py:shut']",
            "agent.tools: {work}/../mine.py:shut: {work}/../mine.py has no shut; tools there: shout",
        ),
        (
            "agent.tools=['../mine.py:plain']",
            "agent.tools: {work}/../mine.py:plain: not a tool but function; decorate it with @tool",
        ),
        ("agent.tools=['../mine.py:HOW_MANY']", "agent.tools: {work}/../mine.py:HOW_MANY: not a tool but int"),
        (
            "agent.tools=[corpus_search]",
            "agent.tool_options.corpus_search.folder: missing; set it in the recipe, or give 'midflight tools run' "
            "-o folder=VALUE",
        ),
        (
            "agent.tools=['nosuch.module:x']",
            "agent.tools: nosuch.module:x: cannot be loaded (ModuleNotFoundError: No module named 'nosuch')",
        ),
        ("agent.tools=[':x']", "agent.tools: :x: write package.module:attribute or file.py:attribute"),
        (
            "agent.tools=[capital, 'midflight.tools.facts.countries:capital']",
            "agent.tools = [capital, 'midflight.tools.facts.countries:capital']: two of them have one name; rename one",
        ),
    ],
)
def test_what_is_wrong_is_one_line(recipe: str, override: str, line: str) -> None:
    assert refused(recipe, override) == line.replace("{work}", str(Path.cwd()))


@pytest.mark.parametrize(
    ("tool", "options", "line"),
    [
        (
            "wikipedia",
            {"language": "de", "base_url": "https://wiki.example/api.php"},
            "language does nothing with base_url; leave it out",
        ),
        (
            "search_literature",
            {"sources": ["arxiv"], "europepmc_url": "https://papers.example"},
            "europepmc_url does nothing without europepmc in sources; leave it out",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(tool: str, options: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as caught:
        make_toolset([tool], {tool: options})
    assert str(caught.value) == f"agent.tool_options.{tool}: {line}"


def test_code_that_fails_is_told(recipe: str) -> None:
    Path("broken.py").write_text("1 / 0\n")
    for _ in range(2):
        assert refused(recipe, "agent.tools=['broken.py:x']") == (
            f"agent.tools: {Path.cwd()}/broken.py:x: cannot be loaded (ZeroDivisionError: division by zero)"
        )
