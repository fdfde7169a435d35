"""search_literature against servers that speak the three documented formats."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from midflight.tools import ErrorKind, InfrastructureError, ToolContext, ToolResult, TransientError, make_toolset
from tests.tools.web.serving import Received, Reply, Server, serving

EUROPEPMC = {
    "version": "6.9",
    "hitCount": 1,
    "resultList": {
        "result": [
            {
                "id": "123",
                "source": "MED",
                "title": "Partition of <i>aspirin</i>.",
                "authorString": "Doe J, Roe R, Poe E, Moe M.",
                "pubYear": "1999",
                "doi": "10.1000/x.1",
                "journalInfo": {"journal": {"title": "J Test"}},
                "abstractText": "<h4>Background</h4>Aspirin is old. "
                + "Filler goes on here. " * 20
                + "The logP is 1.19.",
            }
        ]
    },
}
ARXIV = """<?xml version="1.0" encoding="UTF-8"?>
<feed xmlns="http://www.w3.org/2005/Atom"><title>ArXiv Query</title><entry>
<id>http://arxiv.org/abs/2001.00001v1</id><published>2020-01-01T00:00:00Z</published>
<title>Learning\n  logP</title><summary>We learn it.</summary><author><name>A. One</name></author></entry></feed>"""
OPENALEX = {
    "meta": {"count": 2},
    "results": [
        {
            "id": "https://openalex.org/W1",
            "doi": "https://doi.org/10.1000/y",
            "display_name": "Solubility",
            "publication_year": 2011,
            "authorships": [{"author": {"display_name": "B. Two"}}],
            "primary_location": {"source": None},
            "abstract_inverted_index": {"It": [0], "is": [1, 3], "what": [2], "soluble.": [4]},
        },
        {"id": "https://openalex.org/W2", "doi": None, "display_name": "Learning logP.", "publication_year": None},
    ],
}
ANSWERS: dict[str, Any] = {"/epmc": EUROPEPMC, "/arxiv": ARXIV, "/openalex": OPENALEX}


def answer(received: Received) -> Reply:
    return Reply(ANSWERS[received.path])


def search(server: Server, cache: Path = Path("/nowhere"), **options: Any) -> ToolResult:
    places = {"europepmc": "epmc", "arxiv": "arxiv", "openalex": "openalex"}
    urls = {f"{name}_url": f"{server.url}/{places[name]}" for name in options.get("sources", places)}
    settings = {**urls, "unsafe_allow_loopback": True, "retries": 0, "calls_per_minute": None, **options}
    toolset = make_toolset(["search_literature"], {"search_literature": settings}, ToolContext(cache_folder=cache))
    made = toolset.get("search_literature")
    assert made is not None
    return asyncio.run(made.call({"query": "aspirin logP"}, 10.0))


def test_papers_of_all_sources_each_once() -> None:
    with serving(answer) as server:
        text = search(server).text
        asked = {received.path: received.query for received in server.received}
    assert asked == {
        "/epmc": {"query": "aspirin logP", "format": "json", "resultType": "core", "pageSize": "3"},
        "/arxiv": {"search_query": "all:aspirin AND all:logP", "max_results": "3"},
        "/openalex": {"search": "aspirin logP", "per-page": "3"},
    }
    assert text.splitlines() == [
        "1. Partition of aspirin (1999)",
        "   Doe J, Roe R, Poe E and others; J Test; https://doi.org/10.1000/x.1",
        "   Filler goes on here. Filler goes on here. Filler goes on here. The logP is 1.19.",
        "2. Learning logP (2020)",
        "   A. One; arXiv; https://arxiv.org/abs/2001.00001v1",
        "   We learn it.",
        "3. Solubility (2011)",
        "   B. Two; https://doi.org/10.1000/y",
        "   It is what is soluble.",
    ]


def test_a_source_that_fails_is_told_and_all_of_them_are_infrastructure() -> None:
    def one_fails(received: Received) -> Reply:
        return Reply("busy", 503) if received.path == "/arxiv" else answer(received)

    with serving(one_fails) as server:
        result = search(server)
        assert result.error is None and result.text.startswith("1. Partition")
        assert result.text.endswith("\n(no answer from arXiv: HTTP 503)")
    with (
        serving(lambda received: Reply("", 503)) as server,
        pytest.raises(TransientError, match="Europe PMC: HTTP 503"),
    ):
        search(server)


def test_a_source_that_is_busy_is_asked_again_and_what_lacks_it_is_not_kept(tmp_path: Path) -> None:
    busy = 3

    def busy_at_first(received: Received) -> Reply:
        nonlocal busy
        if received.path == "/arxiv" and busy:
            busy -= 1
            return Reply("busy", 503, {"Retry-After": "0"})
        return answer(received)

    with serving(busy_at_first) as server:

        def asked() -> str:
            return search(server, tmp_path, retries=1, cache_hours=1).text

        assert asked().endswith("\n(no answer from arXiv: HTTP 503)") and busy == 1
        assert "Learning logP" in asked() and busy == 0  # by its second attempt
        requests = len(server.received)
        assert "Learning logP" in asked() and len(server.received) == requests


def test_nothing_found_is_told_when_the_source_that_is_busy_stays_so() -> None:
    def only_busy(received: Received) -> Reply:
        if received.path == "/arxiv":
            return Reply("busy", 503, {"Retry-After": "0"})
        return Reply({"resultList": {"result": []}} if received.path == "/epmc" else {"results": []})

    with serving(only_busy) as server:
        assert search(server, retries=2) == ToolResult(
            "no paper matches 'aspirin logP'; try fewer or other words\n(no answer from arXiv: HTTP 503)",
            ErrorKind.TOOL_ERROR,
        )
        assert [received.path for received in server.received].count("/arxiv") == 3


def test_a_source_that_refuses_the_query_leaves_the_others_theirs() -> None:
    def one_refuses(received: Received) -> Reply:
        return Reply("too long", 400) if received.path == "/epmc" else answer(received)

    with serving(one_refuses) as server:
        result = search(server)
        assert result.error is None and result.text.startswith("1. Learning logP (2020)")
        assert result.text.endswith("\n(no answer from Europe PMC refuses the query: too long)")
    with serving(lambda received: Reply("too long", 400)) as server:
        assert search(server) == ToolResult("Europe PMC refuses the query: too long", ErrorKind.TOOL_ERROR)
    some_down = {"/epmc": 400, "/arxiv": 503, "/openalex": 400}
    with serving(lambda received: Reply("", some_down[received.path])) as server:
        with pytest.raises(TransientError, match="arXiv: HTTP 503"):  # who is down may have had an answer
            search(server)


@pytest.mark.parametrize(
    ("source", "body"),
    [
        ("europepmc", '{"resultList": 1}'),
        ("europepmc", "<html>"),
        ("arxiv", "<html>"),
        ("arxiv", "<rss></rss>"),
        ("arxiv", '<!DOCTYPE x [<!ENTITY a "b">]><feed xmlns="http://www.w3.org/2005/Atom">&a;</feed>'),
        ("openalex", "{}"),
        ("openalex", '{"results": ["x"]}'),
    ],
)
def test_a_malformed_answer_is_infrastructure(source: str, body: str) -> None:
    with serving(lambda received: Reply(body)) as server, pytest.raises(InfrastructureError, match="the answer"):
        search(server, sources=[source])


def test_nothing_found_is_the_planners_to_read() -> None:
    with serving(lambda received: Reply({"results": []})) as server:
        result = search(server, sources=["openalex"])
    assert result == ToolResult("no paper matches 'aspirin logP'; try fewer or other words", ErrorKind.TOOL_ERROR)
