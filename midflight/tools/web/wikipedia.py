"""`wikipedia`: finds the article, then what it says about the question. MediaWiki's action API, with a user agent.

API: mediawiki.org/wiki/API:Search and Extension:TextExtracts (`prop=extracts`, plain text).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from midflight.tools.base import Tool, ToolError, TransientError
from midflight.tools.function import tool
from midflight.tools.options import ToolContext
from midflight.tools.passages import excerpt
from midflight.tools.web.http import Web, WebOptions, check_service, json_of

_SERVICE = "Wikipedia"


class WikipediaOptions(WebOptions):
    language: str = Field(default="en", pattern=r"^[a-z][a-z0-9-]{1,15}$")
    """Of the edition, as in its address."""
    passages: int = Field(default=5, ge=1, le=50)
    """Passages of about 600 characters that match the question."""
    base_url: str = ""
    """Of another wiki's api.php; empty: the edition's."""


def wikipedia(options: WikipediaOptions, context: ToolContext) -> Tool:
    """The tool within its options."""
    api = options.base_url or f"https://{options.language}.wikipedia.org/w/api.php"

    async def ask(**params: str | int) -> dict[str, Any]:
        web = Web(options, _SERVICE)
        answer = await web.get(api, params={"format": "json", "formatversion": 2, "action": "query", **params})
        check_service(answer, _SERVICE)
        found = json_of(answer, _SERVICE)
        if "error" in found:
            raise ToolError(f"Wikipedia refuses the query: {found['error'].get('info', found['error'])}")
        query = found.get("query")
        return query if isinstance(query, dict) else {}

    async def wikipedia(
        topic: Annotated[str, Field(min_length=1, max_length=300, description="name or words to find the article by")],
        question: Annotated[str, Field(max_length=500, description="what to look for in it; empty: the topic")] = "",
    ) -> str:
        """what Wikipedia says: the article that matches best, and its passages that answer the question"""
        found = (await ask(list="search", srsearch=topic.strip(), srlimit=5)).get("search")
        if found is None:
            raise TransientError(f"{_SERVICE}: the answer has no list query.search")
        titles = [str(entry["title"]) for entry in found]
        if not titles:
            raise ToolError(f"no article matches {topic.strip()!r}; try other words")
        pages = (await ask(prop="extracts", explaintext=1, redirects=1, titles=titles[0])).get("pages") or [{}]
        text = pages[0].get("extract")
        if not text:
            raise ToolError(f"the article {titles[0]!r} has no text; others: {', '.join(titles[1:]) or 'none'}")
        lines = [str(pages[0].get("title", titles[0])), "", excerpt(text, question or topic, options.passages, 2000)]
        if titles[1:]:
            lines += ["", f"Other articles: {', '.join(titles[1:])}"]
        return "\n".join(lines)

    return tool(wikipedia)
