"""web_search against servers that speak each service's documented format, well and badly."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.tools import ErrorKind, InfrastructureError, ToolError, ToolResult, TransientError, make_toolset
from midflight.tools.web.http import Answer, check_service
from midflight.tools.web.providers import PROVIDERS, ddgs_text
from tests.tools.web.serving import Reply, Server, in_turn, serving

KEYS = {"tavily": "TAVILY_API_KEY", "serper": "SERPER_API_KEY", "brave": "BRAVE_API_KEY"}
KEY = "k-5ecret"
TAVILY = {
    "query": "x",
    "answer": None,
    "images": [],
    "results": [
        {"title": "Peru", "url": "https://a.example/peru", "content": "A country.", "score": 0.9, "raw_content": None},
        {"title": "Lima", "url": "https://a.example/lima", "content": "Its capital.", "score": 0.8},
    ],
    "response_time": 1.1,
}
SERPER = {
    "searchParameters": {"q": "x", "type": "search"},
    "organic": [
        {"title": "Peru", "link": "https://a.example/peru", "snippet": "A country.", "position": 1},
        {"title": "Lima", "link": "https://a.example/lima", "snippet": "Its capital.", "position": 2},
    ],
    "credits": 1,
}
BRAVE = {
    "type": "search",
    "query": {"original": "x"},
    "web": {
        "type": "search",
        "results": [
            {
                "title": "<b>Peru</b>",
                "url": "https://a.example/peru",
                "description": "A <strong>country</strong>.",
            },
            {"title": "Lima", "url": "https://a.example/lima", "description": "Its&nbsp;capital."},
        ],
    },
}
SEARXNG = {
    "query": "x",
    "number_of_results": 0,
    "results": [
        {"title": "Peru", "url": "https://a.example/peru", "content": "A country.", "engine": "brave"},
        {"title": "Lima", "url": "https://a.example/lima", "content": "Its capital."},
    ],
}
GOOD: dict[str, dict[str, Any]] = {"tavily": TAVILY, "serper": SERPER, "brave": BRAVE, "searxng": SEARXNG}
EXPECTED = "1. Peru\n   https://a.example/peru\n   A country.\n2. Lima\n   https://a.example/lima\n   Its capital."


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KEYS.values():
        monkeypatch.setenv(variable, KEY)


def search(server: Server, provider: str, query: str = "peru & lima", **options: Any) -> Any:
    settings = {"provider": provider, "base_url": server.url, "unsafe_allow_loopback": True, "results": 2, **options}
    made = make_toolset(["web_search"], {"web_search": settings}).get("web_search")
    assert made is not None
    return asyncio.run(made.call({"query": query}, 10.0))


@pytest.mark.parametrize("provider", GOOD)
def test_a_search_asks_and_reads_as_the_service_documents(provider: str) -> None:
    with serving(lambda received: Reply(GOOD[provider])) as server:
        assert search(server, provider).text == EXPECTED
        (asked,) = server.received
    if provider == "tavily":
        assert (asked.method, asked.path) == ("POST", "/search")
        assert asked.json == {"query": "peru & lima", "max_results": 2}
        assert asked.headers["authorization"] == f"Bearer {KEY}"
    elif provider == "serper":
        assert (asked.method, asked.path) == ("POST", "/search")
        assert asked.json == {"q": "peru & lima", "num": 2}
        assert asked.headers["x-api-key"] == KEY
    elif provider == "brave":
        assert (asked.method, asked.path) == ("GET", "/res/v1/web/search")
        assert asked.query == {"q": "peru & lima", "count": "2"}
        assert asked.headers["x-subscription-token"] == KEY
    else:
        assert (asked.method, asked.path) == ("GET", "/search")
        assert asked.query == {"q": "peru & lima", "format": "json"}
        assert KEY not in str(asked)


@pytest.mark.parametrize("provider", GOOD)
def test_a_refused_key_is_infrastructure_asked_once_and_never_shown(
    provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"detail": {"error": f"Unauthorized: invalid key {KEY}"}}
    with serving(lambda received: Reply(body, 401)) as server:
        with pytest.raises(InfrastructureError, match="HTTP 401, access is refused") as caught:
            search(server, provider)
        assert len(server.received) == 1
    assert not isinstance(caught.value, TransientError)
    assert KEY not in str(caught.value) and KEY not in caplog.text


def test_no_part_of_the_key_is_left_where_an_error_is_cut() -> None:
    for before in range(220, 242):
        answer = Answer("https://a.example", 400, {}, b"x" * before + KEY.encode())
        with pytest.raises(ToolError) as caught:
            check_service(answer, "S", KEY)
        assert KEY[:3] not in str(caught.value)


@pytest.mark.parametrize("provider", GOOD)
def test_nothing_found_is_the_planners_to_read(provider: str) -> None:
    empty: dict[str, Any] = {**GOOD[provider], "results": [], "organic": [], "web": {"results": []}}
    with serving(lambda received: Reply(empty)) as server:
        result = search(server, provider)
    assert result.error is ErrorKind.TOOL_ERROR and "nothing found for 'peru & lima'" in result.text


def test_a_query_of_white_space_is_the_planners_too() -> None:
    made = make_toolset(["web_search"]).get("web_search")
    assert made is not None
    result = asyncio.run(made.call({"query": " \t"}, 10.0))  # ddgs would call it a fault of its own
    assert result == ToolResult("the query is empty; write words", ErrorKind.TOOL_ERROR)


def test_brave_answers_without_web_when_nothing_is_found() -> None:
    with serving(lambda received: Reply({"type": "search", "query": {}})) as server:
        assert search(server, "brave").error is ErrorKind.TOOL_ERROR


def test_a_query_that_the_service_refuses_is_the_planners() -> None:
    with serving(lambda received: Reply({"detail": {"error": "Query is too long."}}, 400)) as server:
        result = search(server, "tavily")
    assert result.error is ErrorKind.TOOL_ERROR and "Query is too long." in result.text


def test_searxng_says_how_to_allow_json() -> None:
    with serving(lambda received: Reply("forbidden", 403)) as server:
        with pytest.raises(InfrastructureError, match="search.formats"):
            search(server, "searxng")


def test_fields_that_are_missing_are_empty() -> None:
    with serving(lambda received: Reply({"results": [{"url": None, "title": 3}]})) as server:
        assert search(server, "searxng").text == "1. 3\n   \n   "


def test_a_missing_key_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAVILY_API_KEY")
    with pytest.raises(UserError, match="web_search cannot be used yet: set TAVILY_API_KEY in the environment"):
        make_toolset(["web_search"], {"web_search": {"provider": "tavily"}})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"provider": "bing"},
            "agent.tool_options.web_search.provider = bing: must be 'ddgs', 'tavily', 'serper'",
        ),
        ({"provider": "searxng"}, "searxng needs base_url, such as https://searx.example.org"),
        ({"provider": "searxng", "base_url": "x.example"}, "x.example: not an http or https URL"),
        (
            {"provider": "searxng", "base_url": "http://x:65536"},
            "http://x:65536: there is no port 65536; they go from 1 to 65535",
        ),
        ({"base_url": "https://a:b@x"}, "x: a URL with a user name or password is not read"),
        ({"base_url": "https://x"}, "base_url does nothing with provider: ddgs; leave it out"),
        ({"unsafe_allow_loopback": True}, "unsafe_allow_loopback does nothing with provider: ddgs"),
        ({"max_bytes": 10}, "max_bytes does nothing with provider: ddgs; leave it out"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        make_toolset(["web_search"], {"web_search": options})
    assert line in str(caught.value) and str(caught.value).startswith("agent.tool_options.web_search")


DUCKDUCKGO = """<html><body><div class="result results_links"><div class="links_main links_deep result__body">
<h2 class="result__title"><a href="https://a.example/peru">Peru</a></h2>
<a class="result__snippet" href="https://a.example/peru">A country.</a></div></div></body></html>"""


def test_ddgs_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("ddgs.engines.duckduckgo").Duckduckgo
    with serving(in_turn(Reply(DUCKDUCKGO), Reply("blocked", 403))) as server:
        monkeypatch.setattr(engine, "search_url", f"{server.url}/html/")
        found = ddgs_text("peru", 3, 2.0, "duckduckgo")
        assert [(item["title"], item["href"]) for item in found] == [("Peru", "https://a.example/peru")]
        assert b"q=peru" in server.received[0].body
        with pytest.raises(TransientError, match="^ddgs: its engines refuse: HTTP 403$"):
            ddgs_text("peru", 3, 2.0, "duckduckgo")


def test_the_providers_have_no_key_in_an_address() -> None:
    assert {name: provider.variable for name, provider in PROVIDERS.items() if provider.variable} == KEYS
    assert json.dumps(GOOD)  # the formats above are JSON
