"""`read_url`: what a page says, or what of it answers a question."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from midflight.tools.base import Tool, ToolError
from midflight.tools.function import tool
from midflight.tools.options import ToolContext
from midflight.tools.reading.documents import document_text
from midflight.tools.reading.retrieval import RetrievalOptions, excerpt_by
from midflight.tools.web.http import Web, WebOptions, check_page
from midflight.tools.worker import run_in_worker


class ReadUrlOptions(WebOptions, RetrievalOptions):
    passages: int = Field(default=6, ge=1, le=50)
    """Passages of about 600 characters that match a question."""
    whole_characters: int = Field(default=4000, ge=200, le=1_000_000_000)
    """A text that is not longer is given whole, question or not."""


def read_url(options: ReadUrlOptions, context: ToolContext) -> Tool:
    """The tool within its options."""

    async def read_url(
        url: Annotated[str, Field(min_length=1, max_length=2000, description="http or https address of a page or PDF")],
        question: Annotated[str, Field(max_length=500, description="what to look for in it; empty: its start")] = "",
    ) -> str:
        """text of a web page or PDF, or the passages of it that answer a question"""
        answer = await Web(options).get(url.strip(), redirects=5)
        check_page(answer)
        try:
            found = await run_in_worker(document_text, answer.body, answer.content_type, answer.charset)
        except ToolError as error:
            raise ToolError(f"{answer.url}: {error}") from error
        text = await excerpt_by(
            context, options.embeddings, found["text"], question, options.passages, options.whole_characters
        )
        heading = f"{found['title']}\n" if found["title"] else ""
        return f"{heading}{answer.url}\n\n{text}"

    return tool(read_url)
