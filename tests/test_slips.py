"""Slips of a key's place: whatever is refused, and however, the line shows no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight import slips
from midflight.cli import run
from midflight.cli.ending import fail
from midflight.errors import UserError
from midflight.recipe import RecipeError, load_recipe
from midflight.tools import make_toolset

RECIPE = """\
name: served
engines:
  strong: {provider: openai, model: m, base_url: "http://127.0.0.1:1/v1", key_variable: STRONG_KEY}
agent:
  engine: strong
  planner: {max_tokens: 200}
  executor: {kind: direct}
  verifier: {kind: llm}
  generator: {kind: llm}
  tools: [calculator]
"""
PLAIN = "hush7"
"""A key that has the form of none."""
FORMED = "sk-SECRET1234567"
WRITE = "write key=value, with no spaces around '=', such as training.steps=10"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1
    return line.removeprefix("midflight: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("engines.strong.key_variable:{}", f"override engines.strong.key_variable: no '='; {WRITE}"),
        ("engines.strong.key_variable-{}", f"override engines.strong.key_variable: no '='; {WRITE}"),
        ("engines.strong.api_key.{}", f"override engines.strong.api_key: no '='; {WRITE}"),
        ("engine.strong.api_key {}", f"override engine.strong.api_key: no '='; {WRITE}"),
        ("={}", f"override =...: no key before '='; {WRITE}"),
        (
            'engines.strong.api_key="{}',
            "override engines.strong.api_key=...: the value is not YAML (found unexpected end of stream); quote it",
        ),
        (
            "engines.strong.api_key=*{}",
            "override engines.strong.api_key=...: the value is not YAML (found undefined alias '...'); quote it",
        ),
        ("engines.strong.api_key={}", "engines.strong.api_key: unknown key; did you mean engines.strong.api?"),
        ("engines.strong.api_key.{}=1", "engines.strong.api_key: unknown key; did you mean engines.strong.api?"),
        ("engines.strong.model.at={}", "engines.strong.model.at: engines.strong.model is a value, not a section; set "),
        ("agent.headers={{Authorization: Bearer {}}}", "agent.headers.Authorization: unknown key; "),
        ("agent.sent={{Authorization: Bearer {}, a: b}}", "agent.sent: unknown key; "),
        ("authorization=Bearer {}", "authorization: unknown key; "),
        ("credentials={}", "credentials: unknown key; "),
        ("agent.tools={{api_key: {}}}", "agent.tools.api_key: agent.tools is a value, not a section; set agent.tools "),
        ("name=[token: {}]", "name = ...: must be a valid string; quote it"),
        (
            "agent.tool_options.web_search.key={}",
            "agent.tool_options.web_search: agent.tools does not have it; add it there, or leave this out",
        ),
        ("agent.tool_options.calculator.api_key={}", "agent.tool_options.calculator.api_key: unknown key; "),
        ("agent.tool_options.calculator.api_key=[{}]", "agent.tool_options.calculator.api_key: unknown key; "),
        (
            "agent.tool_options.calculator.seconds=[key: {}]",
            "agent.tool_options.calculator.seconds: must be a valid number",
        ),
        (
            "agent.mcp_servers.shop={{url: 'http://127.0.0.1:1', headers: {{X: Bearer {}}}}}",
            "agent.mcp_servers.shop: env and headers take names of environment variables, such as SHOP_TOKEN, and ",
        ),
        (
            "agent.mcp_servers.shop={{command: [shop], env: [SHOP={}]}}",
            "agent.mcp_servers.shop: env and headers take names of environment variables, such as SHOP_TOKEN, and ",
        ),
        ("agent.mcp_servers.shop.command=shop --api-key {}", "agent.mcp_servers.shop.command = ...: must be a list"),
        ("agent.mcp_servers.shop.password={}", "agent.mcp_servers.shop.password: unknown key; "),
    ],
)
def test_a_change_shows_its_key_alone(capsys: pytest.CaptureFixture[str], override: str, line: str) -> None:
    found = refused(capsys, "solve", "2+2?", "--recipe", "r.yaml", override.format(PLAIN)) if "=" in override else ""
    found = found or refused(capsys, "eval", "r.yaml", override.format(PLAIN))
    assert found.startswith(line) and PLAIN not in found


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["engines.strong.key_variable:{}"], f"override engines.strong.key_variable: no '='; {WRITE}"),
        (["engines.strong.api_key", "{}"], f"override engines.strong.api_key: no '='; {WRITE}"),
        (["agent.max_turns", "3"], f"override agent.max_turns: no '='; {WRITE}"),
        (["with", "api_key:", "{}"], "with: is no key=value, so quote the question: midflight solve ..."),
        (["training.token={}"], "training.token: does nothing in midflight solve; leave it out"),
        (
            ["of", "example.com", "{}"],
            f"of: is no key=value, so quote the question: midflight solve '2+2? of example.com {PLAIN}'",
        ),
    ],
)
def test_what_stands_behind_a_question(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert refused(capsys, "solve", "2+2?", *(word.format(PLAIN) for word in words)) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["expression:{}"], "expression: write key=value"),
        (["{}"], "...: write key=value"),
        (["api_key={}", "api_key={}"], "api_key=...: api_key is given twice; leave one out"),
        (["expression=1", "-o", "key:{}"], "key: write key=value"),
        (["expression=1", "-o", "key=[{}"], "key=...: not YAML ("),
        (["expression=1", "-o", "api_key={}"], "agent.tool_options.calculator.api_key: unknown key; "),
    ],
)
def test_a_call_of_a_tool(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    found = refused(capsys, "tools", "run", "calculator", *(one.format(FORMED) for one in arguments))
    assert found.startswith(line) and FORMED not in found


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "r.yaml", "--model", "{}"],
        ["eval", "{}"],
        ["eval", "r.yaml", "model.name={}"],
        ["eval", "r.yaml", "agent.engine={}"],
        ["eval", "r.yaml", "agent.tools=[{}]"],
        ["eval", "r.yaml", "engines.{}.model=1"],
        ["eval", "r.yaml", "seed={}"],
        ["solve", "2+2?", "{}"],
        ["tools", "run", "{}"],
        ["tools", "run", "calculator", "{}=1"],
        ["report", "runs", "{}"],
    ],
)
def test_what_has_the_form_of_a_key_is_in_no_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = refused(capsys, *(one.format(FORMED) for one in arguments))
    assert "[key]" in found and FORMED not in found


def test_a_recipe_of_a_file(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE.replace("STRONG_KEY", f"*{PLAIN}"))
    with pytest.raises(RecipeError, match=r"^recipe r.yaml, line 3: not YAML: found undefined alias '\.\.\.'$"):
        load_recipe("r.yaml")


def test_changes_that_are_one_text() -> None:
    with pytest.raises(RecipeError, match=r"^overrides: must be a list, not a text; write \['engines.a.key=value'\]$"):
        load_recipe("r.yaml", f"engines.a.key={PLAIN}")


def test_what_an_idle_key_is_left_out_for(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "r.yaml").write_text(f"{RECIPE}  tool_options: {{calculator: {{retries: 1}}}}\n")
    load_recipe("r.yaml", ["agent.tools=[sql]", "agent.tool_options.sql.files=[a.csv]"], tasks=False, training=False)
    assert capsys.readouterr().err == "agent.tool_options.calculator: agent.tools does not have it; left out\n"


@pytest.mark.parametrize(
    "text",
    [
        "sk-no-key-required is none",
        "run task-sk-20240101 is fine",
        "runs/sk-20240101-full: no such folder",
        "sk-20240101-full.yaml: no such file",
        "hf_models_2024: no such folder",
        "http://127.0.0.1:8000/v1",
        "a bearer of good news, and keys",
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert slips.without_keys(text) == text and str(UserError(text)) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer 0123456789abcdef", "Authorization: Bearer [key]"),
        ("engines.x.sk-ant-api03-AbC_d: unknown", "engines.x.[key]: unknown"),
        ("hf_AbCdEfGhIjKlMnOpQrStUv", "[key]"),
        ("key=AIzaSyA0123456789012345678901234567890", "key=[key]"),
        ("http://me:hush@127.0.0.1/v1", "http://[key]@127.0.0.1/v1"),
    ],
)
def test_forms_of_keys(capsys: pytest.CaptureFixture[str], text: str, shown: str) -> None:
    assert slips.without_keys(text) == shown and str(UserError(text)) == shown
    fail(text, 1)
    assert capsys.readouterr().err == f"midflight: {shown}\n"


def test_a_server_that_is_made_without_a_recipe() -> None:
    with pytest.raises(UserError) as caught:
        make_toolset([], servers={"shop": {"url": "http://127.0.0.1:1", "headers": {"X": f"Bearer {PLAIN}"}}})
    said = str(caught.value)
    assert said.startswith("agent.mcp_servers.shop: env and headers take") and PLAIN not in said
