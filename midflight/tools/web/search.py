"""`web_search`: titles, addresses and excerpts from a search service."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from midflight.errors import GivenUp
from midflight.tools.base import Tool, ToolError
from midflight.tools.function import tool
from midflight.tools.options import ToolContext, installed, key_from, to_install
from midflight.tools.web.http import ServiceUrl, Web, WebOptions
from midflight.tools.web.providers import PROVIDERS


class WebSearchOptions(WebOptions):
    provider: Literal["ddgs", "tavily", "serper", "brave", "searxng"] = "ddgs"
    """The service. `ddgs` needs the extra `tools` and no key, `searxng` a `base_url`; the others need a key in the
    environment: TAVILY_API_KEY, SERPER_API_KEY, BRAVE_API_KEY."""
    results: int = Field(default=5, ge=1, le=20)
    """Most results of a search."""
    base_url: ServiceUrl = ""
    """Of a SearXNG instance, where it is required, or of a gateway to a service; empty: the service itself."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.provider == "searxng" and not self.base_url:
            raise ValueError("searxng needs base_url, such as https://searx.example.org")
        for name in ("base_url", "unsafe_allow_loopback", "max_bytes") if self.provider == "ddgs" else ():
            if name in self.model_fields_set and getattr(self, name):
                raise ValueError(f"{name} does nothing with provider: ddgs; leave it out")
        return self

    def missing(self) -> str:
        if self.provider == "ddgs":
            return "" if installed("ddgs") else to_install(["ddgs"], "tools")
        variable = PROVIDERS[self.provider].variable
        return f"set {variable} in the environment" if variable and not key_from(variable) else ""


def web_search(options: WebSearchOptions, context: ToolContext) -> Tool:
    """The tool within its options."""

    async def web_search(
        query: Annotated[str, Field(min_length=1, max_length=400, description="what to search for")],
    ) -> str:
        """search the web: titles, addresses and excerpts of pages"""
        if not query.strip():
            raise ToolError("the query is empty; write words")
        provider = PROVIDERS[options.provider]
        key = key_from(provider.variable) if provider.variable else ""
        if provider.variable and not key:
            raise GivenUp(f"web_search: {options.missing()}")
        web = Web(options, options.provider)
        base_url = (options.base_url or provider.base_url).rstrip("/")
        hits = await provider.search(web, base_url, key, query.strip(), options.results)
        if not hits:
            raise ToolError(f"nothing found for {query.strip()!r}; try other words")
        return "\n".join(f"{number}. {hit.title}\n   {hit.url}\n   {hit.snippet}" for number, hit in enumerate(hits, 1))

    return tool(web_search)
