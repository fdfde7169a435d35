"""Web search services, each a request and a reading of its answer in the service's documented format.

Tavily: docs.tavily.com/documentation/api-reference/endpoint/search. Serper: serper.dev (playground). Brave:
api-dashboard.search.brave.com/app/documentation/web-search. SearXNG: docs.searxng.org/dev/search_api.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from midflight.errors import GivenUp
from midflight.tools.base import ToolError, TransientError
from midflight.tools.text import without_tags
from midflight.tools.web.http import Web, check_service, json_of
from midflight.tools.worker import wait_in_worker


@dataclass(frozen=True)
class Hit:
    """One result of a search."""

    title: str
    url: str
    snippet: str


class Provider(Protocol):
    """A search service."""

    @property
    def variable(self) -> str:
        """The environment variable that holds its key; empty where it takes none."""

    @property
    def base_url(self) -> str:
        """Of the public service; empty where there is none."""

    async def search(self, web: Web, base_url: str, key: str, query: str, count: int) -> list[Hit]:
        """At most `count` results, best first.

        Raises:
            ToolError: the service refuses the query.
            InfrastructureError: it does not answer, or not as documented.
        """


class Tavily:
    variable = "TAVILY_API_KEY"
    base_url = "https://api.tavily.com"

    async def search(self, web: Web, base_url: str, key: str, query: str, count: int) -> list[Hit]:
        data = {"query": query, "max_results": count}
        answer = await web.post(f"{base_url}/search", data, headers={"Authorization": f"Bearer {key}"})
        check_service(answer, "Tavily", key)
        return _hits(json_of(answer, "Tavily"), ("results",), "Tavily", "url", "content")[:count]


class Serper:
    variable = "SERPER_API_KEY"
    base_url = "https://google.serper.dev"

    async def search(self, web: Web, base_url: str, key: str, query: str, count: int) -> list[Hit]:
        answer = await web.post(f"{base_url}/search", {"q": query, "num": count}, headers={"X-API-KEY": key})
        check_service(answer, "Serper", key)
        return _hits(json_of(answer, "Serper"), ("organic",), "Serper", "link", "snippet")[:count]


class Brave:
    variable = "BRAVE_API_KEY"
    base_url = "https://api.search.brave.com"

    async def search(self, web: Web, base_url: str, key: str, query: str, count: int) -> list[Hit]:
        headers = {"X-Subscription-Token": key, "Accept": "application/json"}
        params: dict[str, str | int] = {"q": query, "count": count}
        answer = await web.get(f"{base_url}/res/v1/web/search", params=params, headers=headers, redirects=0)
        check_service(answer, "Brave", key)
        found = json_of(answer, "Brave")
        if "web" not in found and found.get("type") == "search":  # as it answers when nothing is found
            return []
        return _hits(found, ("web", "results"), "Brave", "url", "description")[:count]


class SearXNG:
    variable = ""
    base_url = ""

    async def search(self, web: Web, base_url: str, key: str, query: str, count: int) -> list[Hit]:
        answer = await web.get(f"{base_url}/search", params={"q": query, "format": "json"}, redirects=0)
        if answer.status == 403:
            raise GivenUp("SearXNG: HTTP 403; add json to search.formats in its settings.yml")
        check_service(answer, "SearXNG")
        return _hits(json_of(answer, "SearXNG"), ("results",), "SearXNG", "url", "content")[:count]


class Ddgs:
    """The package ddgs, which asks several engines by itself: its requests do not go through `Web`, and it speaks to no
    host but those engines."""

    variable = ""
    base_url = ""

    async def search(self, web: Web, base_url: str, key: str, query: str, count: int) -> list[Hit]:
        found = await wait_in_worker(ddgs_text, query, count, web.options.request_seconds)
        return [_hit(item, "href", "body") for item in found if item.get("href")]


def ddgs_text(query: str, count: int, seconds: float, backend: str = "auto") -> list[dict[str, str]]:
    """What `ddgs` finds; in a worker, since it blocks, and since its client is watched: of engines that refuse the
    package says what it says where nothing is found.

    Raises:
        ToolError: an engine answered, and has nothing.
        TransientError: none did.
    """
    from ddgs import DDGS
    from ddgs.exceptions import DDGSException
    from ddgs.http_client import HttpClient

    statuses: list[int] = []
    client: Any = HttpClient
    request = client.request

    def watched(one: Any, *arguments: Any, **named: Any) -> Any:
        response = request(one, *arguments, **named)
        statuses.append(response.status_code)
        return response

    client.request = watched
    try:
        return list(DDGS(timeout=max(1, round(seconds))).text(query, max_results=count, backend=backend))
    except DDGSException as error:
        if 200 in statuses:
            raise ToolError("ddgs: no results; try other words") from error
        refused = ", ".join(f"HTTP {status}" for status in sorted(set(statuses)))
        raise TransientError(f"ddgs: {f'its engines refuse: {refused}' if refused else error}") from error
    finally:
        client.request = request


PROVIDERS: Mapping[str, Provider] = {
    "ddgs": Ddgs(),
    "tavily": Tavily(),
    "serper": Serper(),
    "brave": Brave(),
    "searxng": SearXNG(),
}


def _hits(found: Mapping[str, Any], path: Sequence[str], service: str, url: str, snippet: str) -> list[Hit]:
    """The list at `path`, as hits.

    Raises:
        TransientError: there is none.
    """
    here: Any = found
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    if not isinstance(here, list) or not all(isinstance(item, Mapping) for item in here):
        raise TransientError(f"{service}: the answer has no list {'.'.join(path)}")
    return [_hit(item, url, snippet) for item in here]


def _hit(item: Mapping[str, Any], url: str, snippet: str) -> Hit:
    return Hit(_plain(item.get("title")), str(item.get(url) or ""), _plain(item.get(snippet)))


def _plain(value: object) -> str:
    """Text without the markup some services put into it."""
    return " ".join(html.unescape(without_tags(str(value or ""))).split())
