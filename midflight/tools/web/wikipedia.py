"""`wikipedia`: finds the article, then what it says about the question. MediaWiki's action API, with a user agent.

API: mediawiki.org/wiki/API:Search and Extension:TextExtracts (`prop=extracts`, plain text).
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from midflight.tools.base import Tool, ToolError, TransientError
from midflight.tools.function import tool
from midflight.tools.options import ToolContext
from midflight.tools.reading.retrieval import RetrievalOptions, excerpt_by
from midflight.tools.web.http import ServiceUrl, Web, WebOptions, check_service, json_of

_SERVICE = "Wikipedia"


class WikipediaOptions(WebOptions, RetrievalOptions):
    language: str = Field(default="en", pattern=r"^[a-z][a-z0-9-]{1,15}$")
    """Of the edition, as in its address."""
    passages: int = Field(default=5, ge=1, le=50)
    """Passages of about 600 characters that match the question."""
    base_url: ServiceUrl = ""
    """Of another wiki's api.php; empty: the edition's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.base_url and "language" in self.model_fields_set:
            raise ValueError("language does nothing with base_url; leave it out")
        return self


def wikipedia(options: WikipediaOptions, context: ToolContext) -> Tool:
    """The tool within its options."""
    api = options.base_url or f"https://{options.language}.wikipedia.org/w/api.php"

    async def ask(name: str, **params: str | int) -> list[dict[str, Any]]:
        """The list of objects `query.name`, each with a title."""
        web = Web(options, _SERVICE)
        answer = await web.get(api, params={"format": "json", "formatversion": 2, "action": "query", **params})
        check_service(answer, _SERVICE)
        found = json_of(answer, _SERVICE)
        if "error" in found:
            error = found["error"]
            said = error.get("info", error) if isinstance(error, dict) else error
            raise ToolError(f"Wikipedia refuses the query: {said}")
        query = found.get("query")
        entries = query.get(name) if isinstance(query, dict) else None
        if not isinstance(entries, list) or not all(isinstance(one, dict) and "title" in one for one in entries):
            raise TransientError(f"{_SERVICE}: the answer has no list query.{name} of articles")
        return entries

    async def wikipedia(
        topic: Annotated[str, Field(min_length=1, max_length=300, description="name or words to find the article by")],
        question: Annotated[str, Field(max_length=500, description="what to look for in it; empty: the topic")] = "",
    ) -> str:
        """what Wikipedia says: the article that matches best, and its passages that answer the question"""
        found = await ask("search", list="search", srsearch=topic.strip(), srlimit=5)
        titles = [str(entry["title"]) for entry in found]
        if not titles:
            raise ToolError(f"no article matches {topic.strip()!r}; try other words")
        pages = await ask("pages", prop="extracts", explaintext=1, redirects=1, titles=titles[0])
        text = pages[0].get("extract") if pages else None
        if not isinstance(text, str) or not text:
            raise ToolError(f"the article {titles[0]!r} has no text; others: {', '.join(titles[1:]) or 'none'}")
        shown = await excerpt_by(context, options.embeddings, text, question or topic, options.passages, 2000)
        lines = [str(pages[0]["title"]), "", shown]
        if titles[1:]:
            lines += ["", f"Other articles: {', '.join(titles[1:])}"]
        return "\n".join(lines)

    return tool(wikipedia)
