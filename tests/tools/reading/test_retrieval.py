"""Passages by an engine's vectors: found where no word is shared, through a recipe, and every failure typed."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from midflight.agent import LLMExecutor, Query, StopReason
from midflight.building import engines_of, toolset_of
from midflight.cli.trying import try_tool
from midflight.engines.scripted import ScriptedEngine
from midflight.errors import GivenUp, UserError
from midflight.recipe import load_recipe
from midflight.recipe.config import Recipe, RecipeError
from midflight.recipe.tool_rules import has_frozen_models
from midflight.tools import ErrorKind, InfrastructureError, ToolContext, ToolResult, make_toolset
from midflight.tools.base import Toolset
from midflight.tools.data.index import index_name
from tests.agent.doubles import compact_flow
from tests.tools.web.serving import Received, Reply, Server, serving
from tests.tools.web.test_pages import EXTRACT, wiki

CONCEPTS = (("depth", "how far down"), ("capital", "seat of government"), ("mountain", "peak"))
"""What the model of these tests knows to mean the same."""


def meaning(text: str) -> list[float]:
    return [float(any(word in text.lower() for word in words)) for words in CONCEPTS] + [0.1]


class Model:
    """An embedding server by OpenAI's protocol, and what it was asked to embed."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []
        self.reply: Reply | None = None

    def __call__(self, received: Received) -> Reply:
        assert received.path == "/v1/embeddings"
        self.texts.append(received.json["input"])
        if self.reply is not None:
            return self.reply
        data = [{"index": place, "embedding": meaning(text)} for place, text in enumerate(received.json["input"])]
        return Reply({"object": "list", "data": data, "usage": {"prompt_tokens": 1}})


@pytest.fixture
def model() -> Model:
    return Model()


RECIPE = """\
name: near
engines:
  near: {{provider: openai, api: embeddings, model: m, base_url: "{url}/v1", retries: 0}}
  judge: {{provider: openai, model: j, base_url: "{url}/v1"}}
agent:
  planner: {{engine: judge, max_tokens: 200}}
  executor: {{kind: direct}}
  verifier: {{kind: rule}}
  generator: {{kind: last_result}}
  tools: [{name}]
  tool_options: {{{name}: {{embeddings: near, {options}}}}}
"""


def recipe_of(server: Server, folder: Path, name: str, options: str) -> Recipe:
    file = folder / "near.yaml"
    file.write_text(RECIPE.format(url=server.url, name=name, options=options))
    return load_recipe(str(file), training=False)


@contextmanager
def tools_of(server: Server, folder: Path, name: str, options: str) -> Iterator[Toolset]:
    """The toolset of a recipe, with its engines."""
    recipe = recipe_of(server, folder, name, options)
    assert not has_frozen_models(recipe)
    made = engines_of(recipe)
    yield toolset_of(recipe, engine=lambda asked: made.by_name[str(asked)])
    assert {module for module, _ in made.ledger.of} <= {"tools"}
    for one in made.closing:
        one.close()


def call(toolset: Toolset, **arguments: Any) -> ToolResult:
    (name, _) = toolset.names
    made = toolset.get(name)
    assert made is not None
    return asyncio.run(made.call(arguments, 20.0))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


QUESTION = "how far down does it go"
"""Shares no word with the sentence that answers it."""
SOURCE = EXTRACT.replace("\n", "\n\n").replace("greatest depth", "utmost depth")


def test_a_page_gives_the_passage_that_means_the_question(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    page = Reply(SOURCE, headers={"Content-Type": "text/plain"})
    options = "unsafe_allow_loopback: true, passages: 1"
    with (
        serving(model) as server,
        serving(lambda received: page) as site,
        tools_of(server, tmp_path, "read_url", options) as toolset,
    ):
        found = call(toolset, url=site.url, question=QUESTION)
        assert found.error is None and found.text.endswith("\nThe utmost depth of any of them is 281 metres.")
        assert found.text.startswith(f"{site.url}\n\n[...]\n") and len(found.text) < 700
        assert len(model.texts) == 1 and model.texts[0][0] == QUESTION
        model.texts.clear()
        assert call(toolset, url=site.url).text.startswith(f"{site.url}\n\n{SOURCE[:99]}")  # its start, without one
        assert model.texts == []


def test_words_alone_do_not_find_it(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    page = Reply(SOURCE, headers={"Content-Type": "text/plain"})
    with serving(lambda received: page) as site:
        toolset = make_toolset(["read_url"], {"read_url": {"unsafe_allow_loopback": True, "passages": 1}})
        assert "281 metres" not in call(toolset, url=site.url, question=QUESTION).text


def test_wikipedia_shares_it(model: Model, tmp_path: Path) -> None:
    with serving(model) as server, serving(wiki) as site:
        options = f"unsafe_allow_loopback: true, passages: 1, base_url: '{site.url}/w/api.php'"
        with tools_of(server, tmp_path, "wikipedia", options) as toolset:
            text = call(toolset, topic="titicaca", question=QUESTION).text
    assert text.endswith("depth of any of them is 281 metres.\n\nOther articles: Titicaca National Reserve")
    assert len(text) < 700


def test_a_claim_is_held_against_the_passages_that_mean_it(model: Model) -> None:
    class Both(ScriptedEngine):
        vectors = "m"

        async def embed(self, texts: Any) -> Any:
            import numpy as np

            model.texts.append(list(texts))
            return np.float32([meaning(text) for text in texts])

    engine = Both(["supported 1", "supported 1"])
    options = {"verify_claim": {"embeddings": "near", "passages": 1}}
    toolset = make_toolset(["verify_claim"], options, ToolContext(engine=lambda _: engine))
    found = call(toolset, claim="It goes how far down? 281 metres.", source=SOURCE)
    assert found.text.endswith("The utmost depth of any of them is 281 metres.")
    assert found.text.startswith("supported\n") and len(engine.requests) == len(model.texts) == 1
    short = call(toolset, claim="281", source="It is 281 metres.")  # shown whole: nothing to choose from
    assert short == ToolResult("supported\nIt is 281 metres.") and len(model.texts) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "lake.txt").write_text("The depth of the lake is 281 metres.")
    (documents / "peru.md").write_text("Lima is the capital of Peru.")
    (documents / "alps.txt").write_text("A note on mountains.")
    return documents


def test_a_corpus_keeps_each_vector_beside_its_passage(model: Model, tmp_path: Path, folder: Path) -> None:
    with serving(model) as server, tools_of(server, tmp_path, "corpus_search", f"folder: {folder}") as toolset:
        tool = toolset.get("corpus_search")
        assert tool is not None

        def look(query: str, document: str = "") -> str:
            return call(toolset, query=query, **({"document": document} if document else {})).text.split("\n\n")[0]

        assert look(QUESTION) == "[lake.txt]\nThe depth of the lake is 281 metres."
        assert model.texts == [
            ["A note on mountains.", "The depth of the lake is 281 metres.", "Lima is the capital of Peru."],
            [QUESTION],
        ]
        model.texts.clear()
        assert look("seat of government") == "[peru.md]\nLima is the capital of Peru."
        assert look("seat of government", "alps.txt") == "[alps.txt]\nA note on mountains."
        assert "there is no document 'x.txt'" in look("peak", "x.txt")
        assert model.texts == [["seat of government"], ["seat of government"], ["peak"]]  # nothing twice
        model.texts.clear()
        (folder / "lake.txt").write_text("The seat of government lies by the lake.")
        (folder / "peru.md").unlink()
        assert look("capital") == "[lake.txt]\nThe seat of government lies by the lake."
        assert model.texts == [["The seat of government lies by the lake."], ["capital"]]
    index = tmp_path / "cache" / "midflight" / "tools" / "corpora" / index_name(str(folder))
    with sqlite3.connect(index) as connection:
        rows = connection.execute("SELECT model, passage, length(vector) FROM vectors ORDER BY passage").fetchall()
        passages = connection.execute("SELECT rowid FROM passages ORDER BY rowid").fetchall()
    assert rows == [(f"{server.url}/v1 m", number, 16) for (number,) in passages] and len(rows) == 2


def test_many_searches_at_once_embed_a_corpus_once(model: Model, tmp_path: Path, folder: Path) -> None:
    with serving(model) as server, tools_of(server, tmp_path, "corpus_search", f"folder: {folder}") as toolset:
        tool = toolset.get("corpus_search")
        assert tool is not None

        async def many() -> list[ToolResult]:
            return await asyncio.gather(*(tool.call({"query": "peak"}, 60.0) for _ in range(4)))

        assert {result.text.split("\n\n")[0] for result in asyncio.run(many())} == {"[alps.txt]\nA note on mountains."}
    assert sorted(map(len, model.texts)) == [1, 1, 1, 1, 3]


def test_an_engine_whose_vectors_changed_is_infrastructure(model: Model, tmp_path: Path, folder: Path) -> None:
    with serving(model) as server, tools_of(server, tmp_path, "corpus_search", f"folder: {folder}") as toolset:
        call(toolset, query="peak")
        model.reply = Reply({"data": [{"index": 0, "embedding": [1.0, 2.0]}]})
        with pytest.raises(InfrastructureError, match=r"m gives other vectors than it did; delete .*\.sqlite"):
            call(toolset, query="peak")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply({"data": []}), "0 vectors for "),
        (Reply({"data": [{"index": 0, "embedding": [1]}]}), "1 vectors for "),
        (Reply("<html>"), "the answer is not JSON"),
        (Reply({"error": {"message": "no"}}, 401), "HTTP 401: no"),
        (Reply({"error": {"message": "busy"}}, 503), "HTTP 503: busy"),
    ],
)
def test_a_server_that_fails_ends_the_trajectory_as_infrastructure(
    model: Model, tmp_path: Path, folder: Path, reply: Reply, reason: str
) -> None:
    model.reply = reply
    with serving(model) as server, tools_of(server, tmp_path, "corpus_search", f"folder: {folder}") as toolset:
        with pytest.raises(GivenUp, match=reason):
            call(toolset, query="peak")
        model.texts.clear()
        tool = toolset.get("corpus_search")
        writer = LLMExecutor(ScriptedEngine(lambda request: json.dumps({"query": "peak"})))
        flow, _ = compact_flow(lambda request: "corpus_search: peak", tool, executor=writer)
        trajectory = asyncio.run(flow.run(Query("?")))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and reason in trajectory.error
    assert trajectory.answer is None and len(model.texts) == 1  # the engine has tried as often as it may


def test_an_empty_question_is_the_planners_to_mend(model: Model, tmp_path: Path, folder: Path) -> None:
    with serving(model) as server, tools_of(server, tmp_path, "corpus_search", f"folder: {folder}") as toolset:
        assert call(toolset, query=" \n") == ToolResult(
            "there is nothing to look for; write words", ErrorKind.TOOL_ERROR
        )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["agent.tool_options.wikipedia.embeddings=nearr"],
            "agent.tool_options.wikipedia.embeddings = nearr: no such engine; did you mean near? engines of this "
            "recipe: near, judge",
        ),
        (
            ["agent.tool_options.wikipedia.embeddings=judge"],
            "agent.tool_options.wikipedia.embeddings = judge: gives no vectors; name an engine with api: embeddings",
        ),
        (
            ["agent.tools=[wikipedia, generalist]", "agent.tool_options.generalist.engine=near"],
            "agent.tool_options.generalist.engine = near: engines.near.api = embeddings writes no text; name another "
            "engine",
        ),
        (
            ["agent.planner.engine=near"],
            "agent.planner.engine = near: engines.near.api = embeddings writes no text; name another engine",
        ),
        (
            ["agent.tool_options.wikipedia.embeddings=null", "engines.near.model=other"],
            "engines.near: nothing uses it; set agent.tool_options.read_url.embeddings=near, or remove it",
        ),
        (
            ["agent.tool_options.wikipedia.cache_hours=1"],
            "cache_hours would keep what an engine may judge otherwise tomorrow; leave one out",
        ),
        (["engines.near.cache=true"], "engines.near.cache = True: does nothing with api embeddings; remove it"),
        (
            ["engines.near.structured=json_schema"],
            "engines.near.structured = json_schema: does nothing with api embeddings; remove it",
        ),
        (
            ["engines.near.provider=vllm"],
            "engines.near.api = embeddings: takes provider openai, whose protocol a vLLM server speaks too",
        ),
        (
            ["engines.near.provider=local", "engines.near.base_url=null", "engines.near.retries=4"],
            "engines.near.api = embeddings: does nothing with provider local; remove it",
        ),
    ],
)
def test_a_recipe_names_an_engine_of_the_right_kind(tmp_path: Path, overrides: list[str], line: str) -> None:
    file = tmp_path / "near.yaml"
    file.write_text(RECIPE.format(url="http://127.0.0.1:1", name="wikipedia", options="passages: 2"))
    load_recipe(str(file), training=False)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file), overrides, training=False)
    assert line in str(caught.value)


def test_the_command_line_gives_a_tool_its_embeddings(model: Model, tmp_path: Path, folder: Path) -> None:
    with serving(model) as server:
        recipe_of(server, tmp_path, "corpus_search", f"folder: {folder}")
        found = try_tool("corpus_search", ["query=peak"], [], str(tmp_path / "near.yaml"), 20.0)
        assert found.text.split("\n\n")[0] == "[alps.txt]\nA note on mountains." and len(model.texts) == 2
    with pytest.raises(UserError, match="asks a language model; name a recipe that has one with --recipe"):
        try_tool("corpus_search", ["query=peak"], [f"folder={folder}", "embeddings=near"], None, 20.0)
