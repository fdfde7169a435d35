"""read_url and wikipedia against real servers: clean text, the passages that answer, and every failure as a result."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from midflight.tools import ErrorKind, InfrastructureError, ToolResult, TransientError, make_toolset
from midflight.tools.reading import passages
from tests.tools.pdf import pdf
from tests.tools.reading.test_documents import ARTICLE, LAKES
from tests.tools.web.serving import Received, Reply, in_turn, serving

LONG = (
    "<html><head><title>Lakes</title></head><body><article>"
    + "".join(f"<p>{line} {'There is no more to be said of that. ' * 12}</p>" for line in LAKES)
    + "<p>The greatest depth of any of them is 281 metres.</p></article></body></html>"
)


def read(url: str, question: str = "", tool_seconds: float = 20.0, **options: Any) -> ToolResult:
    settings = {"unsafe_allow_loopback": True, **options}
    made = make_toolset(["read_url"], {"read_url": settings}).get("read_url")
    assert made is not None
    arguments = {"url": url, "question": question} if question else {"url": url}
    return asyncio.run(made.call(arguments, tool_seconds))


def test_a_page_is_read_and_named() -> None:
    pytest.importorskip("trafilatura")
    with serving(lambda received: Reply(ARTICLE)) as server:
        result = read(f"{server.url}/lake")
        assert server.received[0].headers["user-agent"].startswith("midflight/")
    assert result.error is None and result.text.startswith(f"Lake & Land\n{server.url}/lake\n\n")
    assert "3,812 metres" in result.text and "Menu entry" not in result.text


def test_a_question_gives_the_passages_that_answer_it() -> None:
    pytest.importorskip("trafilatura")
    with serving(lambda received: Reply(LONG)) as server:
        result = read(server.url, "greatest depth in metres", passages=1)
        whole = read(server.url, whole_characters=100_000)
    assert "281 metres" in result.text and len(result.text) < 800
    assert "Lake number 7" in whole.text


def test_a_pdf_is_read() -> None:
    pytest.importorskip("pypdf")
    reply = Reply(pdf("The depth is 281 m."), headers={"Content-Type": "application/pdf"})
    with serving(lambda received: reply) as server:
        assert read(server.url).text == f"{server.url}\n\nThe depth is 281 m."


def test_failures_of_a_page_are_results_and_transient_ones_are_tried_again() -> None:
    with serving(
        in_turn(Reply("", 503, {"Retry-After": "0"}), Reply("fine", headers={"Content-Type": "text/plain"}))
    ) as server:
        assert read(server.url).text.endswith("\n\nfine")
    with serving(lambda received: Reply("", 503, {"Retry-After": "0"})) as server:
        assert read(server.url, retries=1) == ToolResult(f"{server.url}: HTTP 503", ErrorKind.TOOL_ERROR)
        assert len(server.received) == 2
    with serving(lambda received: Reply("", 404)) as server:
        assert read(server.url) == ToolResult(f"{server.url}: HTTP 404", ErrorKind.TOOL_ERROR)
    with serving(lambda received: Reply(b"\x89PNG", headers={"Content-Type": "image/png"})) as server:
        assert "it is image/png" in read(server.url).text


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Reply("ok page", headers={"Content-Type": "text/plain; charset=idna"}), "\n\nok page"),
        (Reply("<p>ok page", headers={"Content-Type": "text/html; charset=undefined"}), "\n\nok page"),
        (Reply("<p>ok page", headers={"Content-Type": "text/html"}), "\n\nok page"),
        (Reply("\\ud800 ok", headers={"Content-Type": "text/plain; charset=unicode_escape"}), "\n\n? ok"),
        (
            Reply(b"\x1b\x03", headers={"Content-Type": "text/html", "Content-Encoding": "gzip, BR"}),
            ": packed as br, which cannot be unpacked",
        ),
        (
            Reply("x", headers={"Content-Encoding": ", ".join(["gzip"] * 9)}),
            ": Cannot apply more than 5 content encodings.",
        ),
        (
            Reply("<html><script>1</script></html>"),
            ": there is no text in it; it may be made by scripts, or be scanned",
        ),
    ],
)
def test_odd_servers_are_read_or_told_with_their_address(reply: Reply, text: str) -> None:
    pytest.importorskip("trafilatura")
    with serving(lambda received: reply) as server:
        result = read(f"{server.url}/odd", retries=0)
        assert result == ToolResult(f"{server.url}/odd{text}", ErrorKind.TOOL_ERROR if text.startswith(":") else None)


def test_private_addresses_are_refused_without_the_test_setting() -> None:
    with serving(lambda received: Reply("secret")) as server:
        result = read(server.url, unsafe_allow_loopback=False)
        assert server.received == []
    assert result == ToolResult(
        "127.0.0.1: 127.0.0.1 is no public address; only public hosts can be read", ErrorKind.TOOL_ERROR
    )


def test_the_time_limit_interrupts_a_page_that_drips() -> None:
    with serving(lambda received: Reply([b"x"] * 100, pause=0.1)) as server:
        started = time.monotonic()
        result = read(server.url, seconds=0.5)
    assert result == ToolResult("read_url took longer than 0.5 seconds", ErrorKind.TOOL_TIMEOUT)
    assert time.monotonic() - started < 8


EXTRACT = "\n".join(f"{line} {'There is no more to be said of that. ' * 12}" for line in LAKES) + (
    "\nThe greatest depth of any of them is 281 metres."
)


def wiki(received: Received) -> Reply:
    """What en.wikipedia.org answers, formatversion 2."""
    assert received.query["action"] == "query" and received.query["formatversion"] == "2"
    if received.query.get("list") == "search":
        titles = [] if received.query["srsearch"] == "nothing" else ["Lake Titicaca", "Titicaca National Reserve"]
        hits = [{"ns": 0, "title": title, "pageid": 1, "snippet": "<span>x</span>"} for title in titles]
        return Reply({"batchcomplete": True, "query": {"searchinfo": {"totalhits": 2}, "search": hits}})
    assert received.query["titles"] == "Lake Titicaca"
    page = {"pageid": 1, "ns": 0, "title": "Lake Titicaca", "extract": EXTRACT}
    return Reply({"batchcomplete": True, "query": {"pages": [page]}})


def look_up(url: str, topic: str, question: str = "", **options: Any) -> ToolResult:
    settings = {"base_url": f"{url}/w/api.php", "unsafe_allow_loopback": True, **options}
    made = make_toolset(["wikipedia"], {"wikipedia": settings}).get("wikipedia")
    assert made is not None
    return asyncio.run(made.call({"topic": topic, **({"question": question} if question else {})}, 10.0))


def test_wikipedia_reaches_the_passage_of_the_article() -> None:
    with serving(wiki) as server:
        result = look_up(server.url, "titicaca", "the greatest depth", passages=1)
        assert server.received[0].headers["user-agent"].startswith("midflight/")
    assert result.text.startswith("Lake Titicaca\n\n[...]\nThere is no more")
    assert result.text.endswith(
        " The greatest depth of any of them is 281 metres.\n\nOther articles: Titicaca National Reserve"
    )
    assert len(result.text) < 700


def test_wikipedia_without_a_match_and_with_a_broken_answer() -> None:
    with serving(wiki) as server:
        assert look_up(server.url, "nothing") == ToolResult(
            "no article matches 'nothing'; try other words", ErrorKind.TOOL_ERROR
        )
    with serving(lambda received: Reply({"error": {"code": "cirrussearch-error", "info": "too long"}})) as server:
        assert "too long" in look_up(server.url, "x").text
    with serving(lambda received: Reply({"batchcomplete": True})) as server, pytest.raises(TransientError):
        look_up(server.url, "x", retries=0)
    with serving(lambda received: Reply("<html>", 403)) as server, pytest.raises(InfrastructureError):
        look_up(server.url, "x")
    missing = {"query": {"search": [{"title": "A"}, {"title": "B"}], "pages": [{"title": "A", "missing": True}]}}
    with serving(lambda received: Reply(missing)) as server:
        assert look_up(server.url, "x").text == "the article 'A' has no text; others: B"


@pytest.mark.parametrize(
    "query",
    [
        {"search": None},
        {"search": {"title": "x"}},
        {"search": ["x"]},
        {"search": [{"pageid": 1}]},
        [],
    ],
)
def test_an_answer_that_is_not_as_documented_is_infrastructure(query: Any) -> None:
    with (
        serving(lambda received: Reply({"query": query})) as server,
        pytest.raises(TransientError, match=r"Wikipedia: the answer has no list query\.search of articles"),
    ):
        look_up(server.url, "x", retries=0)


def test_pages_that_are_not_as_documented_are_infrastructure_too() -> None:
    def reply(received: Received) -> Reply:
        return wiki(received) if "list" in received.query else Reply({"query": {"pages": {"1": {"extract": "x"}}}})

    with serving(reply) as server, pytest.raises(TransientError, match=r"no list query\.pages of articles"):
        look_up(server.url, "titicaca", retries=0)
    with serving(lambda received: Reply({"error": "no"})) as server:
        assert look_up(server.url, "x") == ToolResult("Wikipedia refuses the query: no", ErrorKind.TOOL_ERROR)


def test_no_article_is_split_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trafilatura")
    for name in ("paragraphs", "best_passages"):
        monkeypatch.setattr(passages, name, None)
    with serving(wiki) as server:
        assert "281 metres" in look_up(server.url, "titicaca", "the greatest depth", passages=1).text
    with serving(lambda received: Reply(LONG)) as server:
        assert "281 metres" in read(server.url, "greatest depth in metres", passages=1).text
