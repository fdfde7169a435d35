"""Every adapter of a service against every fault: a service that fails is infrastructure, never the planner's error.

`ddgs` makes its own requests: it does not obey `Retry-After`, and what it cannot read is to it a page without results.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from midflight.tools import ErrorKind, InfrastructureError, ToolResult, TransientError, make_toolset
from midflight.tools.web import providers
from tests.tools.web.serving import Received, Reply, Server, in_turn, serving
from tests.tools.web.test_literature import ANSWERS
from tests.tools.web.test_pages import wiki
from tests.tools.web.test_search import DUCKDUCKGO, GOOD, KEY, KEYS

JSON = [*GOOD, "wikipedia", "europepmc", "openalex"]
WEB = [*JSON, "arxiv"]
"""Adapters whose requests are ours."""
ALL = [*WEB, "ddgs"]
PLACES = {"europepmc": "/epmc", "arxiv": "/arxiv", "openalex": "/openalex"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KEYS.values():
        monkeypatch.setenv(variable, KEY)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What was waited for between attempts; nobody waits."""
    waited: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr("midflight.tools.limits.asyncio.sleep", recorded)
    yield waited


@pytest.fixture(autouse=True)
def ddgs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddgs in this process, on one engine."""

    async def here(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments, "duckduckgo")

    monkeypatch.setattr(providers, "wait_in_worker", here)


def good(adapter: str, received: Received) -> Reply:
    if adapter == "wikipedia":
        return wiki(received)
    if adapter == "ddgs":
        return Reply(DUCKDUCKGO)
    return Reply(ANSWERS[PLACES[adapter]] if adapter in PLACES else GOOD[adapter])


def ask(adapter: str, server: Server, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ToolResult:
    settings: dict[str, Any] = {"unsafe_allow_loopback": True, "retries": 1, **options}
    if adapter in PLACES:
        name, arguments = "search_literature", {"query": "aspirin logP"}
        settings |= {"sources": [adapter], f"{adapter}_url": server.url + PLACES[adapter], "calls_per_minute": None}
    elif adapter == "wikipedia":
        name, arguments = "wikipedia", {"topic": "titicaca"}
        settings |= {"base_url": f"{server.url}/w/api.php"}
    else:
        name, arguments = "web_search", {"query": "peru"}
        settings |= {"provider": adapter, "base_url": server.url}
    if adapter == "ddgs":
        engine = pytest.importorskip("ddgs.engines.duckduckgo").Duckduckgo
        monkeypatch.setattr(engine, "search_url", f"{server.url}/html/")
        del settings["base_url"], settings["unsafe_allow_loopback"]
    made = make_toolset([name], {name: settings}).get(name)
    assert made is not None
    return asyncio.run(made.call(arguments, 10.0))


@pytest.mark.parametrize("adapter", ALL)
def test_the_answer_as_documented(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda received: good(adapter, received)) as server:
        found = ask(adapter, server, monkeypatch)
    assert found.error is None and found.text
    assert KEY not in found.text


@pytest.mark.parametrize("adapter", ALL)
@pytest.mark.parametrize("status", [401, 403])
def test_access_that_is_refused(adapter: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"error": f"key {KEY} is not valid"}
    with serving(lambda received: Reply(body, status)) as server:
        with pytest.raises(InfrastructureError, match=f"HTTP {status}") as caught:
            ask(adapter, server, monkeypatch)
        if adapter == "ddgs":  # one of many engines that change their mind
            assert str(caught.value) == f"ddgs: its engines refuse: HTTP {status}"
            assert isinstance(caught.value, TransientError) and len(server.received) == 2
        else:
            assert not isinstance(caught.value, TransientError) and len(server.received) == 1
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("adapter", ALL)
def test_429_waits_as_long_as_it_says(adapter: str, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    busy = iter([Reply({"error": "slow down"}, 429, {"Retry-After": "7"})])
    with serving(lambda received: next(busy, None) or good(adapter, received)) as server:
        assert ask(adapter, server, monkeypatch).error is None
        assert pauses == ([0.5] if adapter == "ddgs" else [7.0])
        assert len(server.received) == (3 if adapter == "wikipedia" else 2)


@pytest.mark.parametrize("adapter", WEB)
def test_429_that_asks_for_longer_than_the_call_may_take(
    adapter: str, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    with serving(lambda received: Reply({}, 429, {"Retry-After": "3600"})) as server:
        with pytest.raises(TransientError, match="HTTP 429"):
            ask(adapter, server, monkeypatch)
        assert pauses == [] and len(server.received) == 1


@pytest.mark.parametrize("adapter", ALL)
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_5xx_is_tried_again_and_then_infrastructure(
    adapter: str, status: int, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    with serving(lambda received: Reply("<html>oops</html>", status)) as server:
        with pytest.raises(TransientError, match=f"HTTP {status}"):
            ask(adapter, server, monkeypatch)
        assert pauses == [0.5] and len(server.received) == 2
    broken = iter([Reply("oops", status)])
    with serving(lambda received: next(broken, None) or good(adapter, received)) as server:
        assert ask(adapter, server, monkeypatch).error is None


def truncated(adapter: str, received: Received) -> bytes:
    body = good(adapter, received).body
    whole = json.dumps(body) if isinstance(body, dict) else body
    assert isinstance(whole, str)
    return whole[: len(whole) // 2].encode()


MALFORMED: dict[str, Callable[[str, Received], Reply]] = {
    "empty": lambda adapter, received: Reply(""),
    "a page": lambda adapter, received: Reply("<html><body>Checking your browser</body></html>"),
    "half of it": lambda adapter, received: Reply(truncated(adapter, received)),
    "a list": lambda adapter, received: Reply("[]"),
    "an empty object": lambda adapter, received: Reply("{}"),
    "another object": lambda adapter, received: Reply(
        {"results": 3, "organic": {}, "web": {"results": [1]}, "query": 4}
    ),
    "too deep": lambda adapter, received: Reply("[" * 200_000),
    "no text": lambda adapter, received: Reply(b"\xff\xfe\x00\x01" * 9),
    "no such compression": lambda adapter, received: Reply(b"plain", headers={"Content-Encoding": "gzip"}),
    "cut off on the way": lambda adapter, received: Reply(
        [truncated(adapter, received)], headers={"Content-Length": "99999"}
    ),
}


@pytest.mark.parametrize("adapter", ALL)
@pytest.mark.parametrize("fault", MALFORMED)
def test_an_answer_that_is_none(adapter: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda received: MALFORMED[fault](adapter, received)) as server:
        if adapter == "ddgs" and fault not in ("no such compression", "cut off on the way"):
            found = ask(adapter, server, monkeypatch)
            assert found.error is ErrorKind.TOOL_ERROR and "try other words" in found.text
            return
        with pytest.raises(TransientError):
            ask(adapter, server, monkeypatch)
        assert len(server.received) == 2
    broken = iter([True])
    with serving(
        lambda received: MALFORMED[fault](adapter, received) if next(broken, False) else good(adapter, received)
    ) as server:
        assert ask(adapter, server, monkeypatch).error is None


@pytest.mark.parametrize("adapter", ALL)
@pytest.mark.parametrize("slow", ["body", "start"])
def test_slow(adapter: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(received: Received) -> Reply:
        if slow == "start":
            time.sleep(1.5 if adapter == "ddgs" else 0.6)
            return good(adapter, received)
        return Reply([b"{"] * 40, pause=0.05)

    with serving(answer) as server:
        began = time.monotonic()
        reason = "timed out" if adapter == "ddgs" else "no answer within 0.3 seconds"
        with pytest.raises(TransientError, match=reason):
            ask(adapter, server, monkeypatch, request_seconds=0.3, retries=0)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("adapter", WEB)
def test_too_large(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda received: Reply([b" " * 1000] * 3)) as server:
        with pytest.raises(InfrastructureError, match="larger than 2000 bytes"):
            ask(adapter, server, monkeypatch, max_bytes=2000)


@pytest.mark.parametrize("adapter", WEB)
def test_a_query_that_it_refuses_is_the_planners(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda received: Reply({"detail": f"too long for {KEY}"}, 400)) as server:
        found = ask(adapter, server, monkeypatch)
        assert len(server.received) == 1
    assert found.error is ErrorKind.TOOL_ERROR and "refuses the query" in found.text and "too long" in found.text
    assert KEY not in found.text and "too long for [key]" in found.text  # any key that is set, whoever's it is


@pytest.mark.parametrize("adapter", ALL)
def test_nobody_there(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda received: good(adapter, received)) as server:
        pass
    with pytest.raises(TransientError):
        ask(adapter, server, monkeypatch)


def changed(value: Any, odd: Any) -> Iterator[Any]:
    """`value` with one part of it replaced, each in turn."""
    yield odd
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            for part in changed(value[key], odd):
                made = copy.copy(value)
                made[key] = part
                yield made


@pytest.mark.parametrize("adapter", JSON)
@pytest.mark.parametrize("odd", [None, 7, "x", [], {}, [[3]], {"a": None}, 1e400], ids=repr)
def test_no_part_of_another_type_is_the_planners_error(adapter: str, odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = {
        "wikipedia": {"query": {"search": [{"title": "A"}, {"title": "B"}], "pages": [{"title": "A", "extract": "x"}]}}
    }
    body = sound.get(adapter) or ANSWERS.get(PLACES.get(adapter, "")) or GOOD[adapter]
    with serving(lambda received: Reply(body)) as server:
        for one in changed(body, odd):
            server.answer = in_turn(Reply(json.dumps(one)))
            try:
                found = ask(adapter, server, monkeypatch, retries=0)
            except InfrastructureError:
                continue
            assert "Error: " not in found.text, one
