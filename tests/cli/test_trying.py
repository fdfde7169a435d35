"""`midflight tools` and `midflight tools run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midflight.cli import run
from midflight.sandbox import wasi
from midflight.tools import BUILTIN
from midflight.tools.own import load_own
from tests.recipe.test_config import MINIMAL
from tests.tools.test_options import OWN
from tests.tools.web.serving import Reply, serving

KINDS = '''\
from typing import Literal
from typing_extensions import TypedDict
from midflight.tools import tool

class Spot(TypedDict):
    x: int
    y: int

@tool
def show(
    names: list[str] | None = ...,
    both: int | str = ...,
    word: str | None = ...,
    number: int | None = ...,
    size: float | bool = ...,
    kind: Literal["a", "b"] = ...,
    spot: Spot | None = ...,
    spots: list[Spot] = ...,
) -> str:
    """Show what was given."""
    return ", ".join(f"{name}: {value!r}" for name, value in locals().copy().items() if value is not ...)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["tools", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_every_tool_is_listed_with_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    code, text, _ = output(capsys)
    assert code == 0
    heads = [line.partition("(")[0] for line in text.splitlines() if not line.startswith(" ")]
    assert heads == [*BUILTIN, "finish"]
    assert "calculator(expression)\n    value of an arithmetic expression\ncapital(" in text
    assert (
        "predict_logp(smiles)\n    octanol-water logP of a molecule, estimated from its atoms (Wildman and Crippen)\n"
        "    missing: pip install 'midflight[chemistry]' (rdkit)\n" in text
    )
    assert "missing: set agent.tool_options.corpus_search.folder\n" in text


def test_the_tools_of_a_recipe_are_listed_as_its_sandbox_has_them(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wasi.missing():
        pytest.skip(wasi.missing())
    monkeypatch.setattr("midflight.sandbox.choose.bubblewrap_problem", lambda: "")
    changed = MINIMAL.replace("[calculator]", "[python, shell]\n  sandbox: {kind: wasi}")
    (folder / "r.yaml").write_text(changed)
    code, text, error = output(capsys, "--recipe", "r.yaml")
    assert (code, error) == (0, "")
    lines = text.splitlines()
    assert lines[1].endswith("; every call starts without variables; standard library alone; no network")
    alone = "the sandbox wasi runs Python programs alone; shell takes bubblewrap: set agent.sandbox.kind=bubblewrap"
    assert lines[2] == "shell(command)" and lines[4] == f"    missing: {alone}"


def test_the_tools_of_a_recipe_are_listed_with_those_of_its_servers(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    pytest.importorskip("mcp")
    server = Path(__file__).parents[1] / "tools" / "mcp_server.py"
    (folder / "mine.py").write_text(OWN)
    tools = f"""[calculator, corpus_search, 'mine.py:shout']
  tool_options: {{corpus_search: {{folder: none}}}}
  mcp_servers:
    shop: {{command: [{sys.executable}, {server}], tools: [price, stock]}}
    gone: {{command: [{sys.executable}, -c, pass]}}
    keyed: {{url: "http://127.0.0.1:9/mcp", headers: {{X: NOT_SET_HERE}}}}"""
    (folder / "r.yaml").write_text(MINIMAL.replace("[calculator]", tools))
    code, text, error = output(capsys, "--recipe", "r.yaml")
    assert (code, error) == (0, "")
    closed = "agent.mcp_servers.gone: MCP server gone: MCPError: Connection closed; run it by hand to see why"
    assert text.splitlines() == [
        "calculator(expression)",
        "    value of an arithmetic expression",
        "corpus_search(query, document)",
        "    passages of the user's documents that match the words, each with the document's name",
        f"    missing: {folder}/none: no such folder; give another in agent.tool_options.corpus_search.folder",
        "shout(text)",
        f"    {load_own(f'{folder}/mine.py:shout').description}",
        "shop.price(item, count)",
        "    Price of an item.",
        "shop.stock()",
        "    What there is.",
        "gone.*()",
        "    tools of an MCP server",
        f"    missing: {closed}: {sys.executable} -c pass",
        "keyed.*()",
        "    tools of an MCP server",
        "    missing: agent.mcp_servers.keyed: set NOT_SET_HERE in the environment",
        text.splitlines()[-2],
        text.splitlines()[-1],
    ]
    assert text.splitlines()[-2].startswith("finish(")
    assert output(capsys, "--recipe", "r.yaml", "run", "calculator", "expression=1") == (
        2,
        "",
        "midflight: --recipe r.yaml: write it after run\n",
    )


def test_a_tool_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "run", "calculator", "expression=2 ** 10") == (0, "1024\n", "")
    code, _, error = output(capsys, "run", "calculator", "expression=1 / 0")
    assert (code, error) == (1, "midflight: tool_error: division by zero\n")


def test_options_are_given_with_it(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "docs").mkdir()
    (folder / "docs" / "a.txt").write_text("Lakes are \x1b[31mdeep.")
    found = output(capsys, "run", "corpus_search", "query=lakes", "-o", "folder=docs", "--option", "passages=1")
    assert found == (0, "[a.txt]\nLakes are ?[31mdeep.\n", "")
    code, _, error = output(capsys, "run", "corpus_search", "query=x", "-o", "folder=docs", "-o", "passage=1")
    assert (code, error) == (
        2,
        "midflight: agent.tool_options.corpus_search.passage = 1: unknown key; did you mean "
        "agent.tool_options.corpus_search.passages?\n",
    )


def test_own_tools_by_place_and_by_the_recipe(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "mine.py").write_text(OWN)
    (folder / "r.yaml").write_text(
        MINIMAL.replace(
            "[calculator]", "[calculator, 'mine.py:shout']\n  tool_options: {shout: {result_characters: 200}}"
        )
    )
    assert output(capsys, "run", "mine.py:shout", "text=hey") == (0, "HEY\n", "")
    code, text, _ = output(capsys, "run", "shout", f"text={'x' * 999}", "--recipe", "r.yaml")
    assert code == 0 and "characters left out" in text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ('names=["x", "y"]', "['x', 'y']"),
        ("names=null", "None"),
        ("both=12", "'12'"),
        ("word=12", "'12'"),
        ("word=null", "'null'"),
        ("number=12", "12"),
        ("size=true", "True"),
        ("kind=b", "'b'"),
        ("spot={x: 1, y: 2}", "{'x': 1, 'y': 2}"),
        ("spots=[{x: 1, y: 2}]", "[{'x': 1, 'y': 2}]"),
    ],
)
def test_a_value_is_text_where_the_schema_takes_it_as_that_and_yaml_where_not(
    capsys: pytest.CaptureFixture[str], folder: Path, argument: str, value: str
) -> None:
    (folder / "kinds.py").write_text(KINDS)
    assert output(capsys, "run", "kinds.py:show", argument) == (0, f"{argument.partition('=')[0]}: {value}\n", "")


def test_a_value_that_no_kind_fits_is_one_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "kinds.py").write_text(KINDS)
    code, _, error = output(capsys, "run", "kinds.py:show", "names=x")
    assert code == 2 and error.startswith("midflight: kinds.py:show: names: 'x' is not valid under any of the given")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[1", "[1: not YAML (expected ',' or ']', but got '<stream end>'); quote it"),
        ("2024-99-99", "2024-99-99: not YAML (month must be in 1..12); quote it"),
        ("[" * 700, "[" * 237 + "...: not YAML (nested too deeply); quote it"),
    ],
)
def test_an_argument_or_option_that_is_not_yaml_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, value: str, reason: str
) -> None:
    (folder / "kinds.py").write_text(KINDS)
    for key, arguments in (("number", [f"number={value}"]), ("seconds", ["-o", f"seconds={value}"])):
        found = output(capsys, "run", "kinds.py:show", *arguments)
        assert found == (2, "", f"midflight: {key}={reason}\n")


def test_the_sandbox_of_the_recipe_is_used(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "start").mkdir()
    (folder / "start" / "a.txt").write_text("begun")
    sandbox = "{kind: none, unsafe_no_sandbox: true, files: start, keep: kept, output_kb: 1}"
    (folder / "r.yaml").write_text(MINIMAL.replace("[calculator]", f"[python, list_files]\n  sandbox: {sandbox}"))
    found = output(capsys, "run", "list_files", "path=.", "--recipe", "r.yaml")
    assert found == (0, "a.txt 5\n", "") and (folder / "kept" / "workspace-1" / "a.txt").read_text() == "begun"
    code, _, error = output(capsys, "run", "python", "code=print('x' * 3000)", "--recipe", "r.yaml")
    assert code == 1 and error.startswith("midflight: tool_error: output_limit: ")


def test_the_engine_of_the_recipe_is_asked(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("openai")
    answer = {"choices": [{"message": {"role": "assistant", "content": "Lima"}, "finish_reason": "stop"}]}
    with serving(lambda received: Reply({"id": "1", "object": "chat.completion", **answer})) as server:
        engines = f"engines:\n  far: {{provider: openai, model: m, base_url: '{server.url}/v1'}}\n"
        tools = "[generalist]\n  tool_options: {generalist: {engine: far}}"
        (folder / "r.yaml").write_text(MINIMAL.replace("[calculator]", tools) + engines)
        assert output(capsys, "run", "generalist", "query=?", "--recipe", "r.yaml") == (0, "Lima\n", "")
        code, _, error = output(capsys, "run", "generalist", "query=?", "--recipe", "r.yaml", "-o", "engine=near")
    assert (code, error) == (2, "midflight: engine = near: the recipe has no such engine; it has: far\n")


def test_tools_of_a_server_by_the_recipe(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("mcp")
    server = Path(__file__).parents[1] / "tools" / "mcp_server.py"
    (folder / "r.yaml").write_text(
        MINIMAL.replace("[calculator]", f"[]\n  mcp_servers: {{shop: {{command: ['{sys.executable}', '{server}']}}}}")
    )
    arguments = ("run", "shop.price", "item=fig", "count=2", "--recipe", "r.yaml")
    assert output(capsys, *arguments) == (0, "2 x fig: 6\n", "")
    code, _, error = output(capsys, "run", "price", "--recipe", "r.yaml")
    assert code == 2 and error.endswith(", shop.TOOL\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["calculater", "expression=1"],
            "calculater: no such tool; did you mean calculator? there are: calculator, capital",
        ),
        (["capital", "country=Peru", "country=Chile"], "country=Chile: country is given twice; leave one out"),
        (["capital", "country=Peru", "-o", "seconds=1", "-o", "seconds=2"], "seconds=2: seconds is given twice"),
        (["sql", "query=SELECT 1", "-o", "files=a.csv"], "agent.tool_options.sql.files = a.csv: must be a list; write"),
        (["sql", "query=SELECT 1"], "agent.tool_options.sql.files: missing; set it in the recipe, or give 'midflight "),
        (["calculator"], "calculator: 'expression' is a required property; write key=value for: expression"),
        (["calculator", "expression"], "expression: write key=value"),
        (["calculator", "expression=1", "more=2"], "calculator: Additional properties are not allowed"),
        (["finish"], "finish: no such tool"),
        (["generalist", "query=x"], "generalist: asks a language model; name a recipe that has one with --recipe"),
        (["none.py:x"], "agent.tools: none.py:x: no such file"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    code, text, error = output(capsys, "run", *arguments)
    assert code == 2 and text == "" and error.startswith(f"midflight: {line}") and error.count("\n") == 1
