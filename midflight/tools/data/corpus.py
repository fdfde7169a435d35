"""`corpus_search`: the user's documents, by their words or by an embedding engine's vectors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from midflight.section import MOST_SECONDS
from midflight.tools.base import Tool, ToolResult
from midflight.tools.data import vectors
from midflight.tools.data.index import documents, index_name, search
from midflight.tools.function import FunctionTool
from midflight.tools.options import ToolContext, installed, to_install
from midflight.tools.reading.retrieval import RetrievalOptions, embedder_of
from midflight.tools.worker import wait_in_worker


class CorpusOptions(RetrievalOptions):
    cacheable: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("folder",)

    folder: str
    """With the documents, in folders below it as well: `.txt`, `.md`, `.rst`, `.html`, `.htm`, `.pdf`. One
    that cannot be read, or takes half of `seconds` or 60 seconds of a processor, is named in each result, and tried
    again when its file changes; what may pass (permissions, a missing package) is tried in each search."""
    passages: int = Field(default=5, ge=1, le=50)
    """Passages of about 600 characters that a search gives."""
    seconds: float | None = Field(default=600.0, gt=0, le=MOST_SECONDS)
    """Time limit of a call; the first one indexes all, later ones what has changed."""
    result_characters: int | None = Field(default=8000, ge=200, le=1_000_000_000)

    def missing(self) -> str:
        if not Path(self.folder).is_dir():
            return f"{self.folder}: no such folder; give another in agent.tool_options.corpus_search.folder"
        absent = [package for package in ("trafilatura", "lxml_html_clean", "pypdf") if not installed(package)]
        kinds = {path.suffix.lower() for path in documents(Path(self.folder))} - {".txt", ".md", ".rst"}
        return to_install(absent, "tools") if absent and kinds else ""


_SECONDS: ContextVar[float] = ContextVar("_SECONDS")


class _CorpusSearch(FunctionTool):
    """Its function knows the time limit of the call."""

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """See `Tool.call`."""
        token = _SECONDS.set(seconds)
        try:
            return await super().call(arguments, seconds)
        finally:
            _SECONDS.reset(token)


def corpus_search(options: CorpusOptions, context: ToolContext) -> Tool:
    """The tool within its options."""

    async def corpus_search(
        query: Annotated[str, Field(min_length=1, max_length=500, description="words to look for")],
        document: Annotated[str, Field(max_length=500, description="name of the only one to look in; empty: all")] = "",
    ) -> str:
        """passages of the user's documents that match the words, each with the document's name"""
        folder = os.path.abspath(options.folder)  # a worker may be in another
        index = str(context.cache_folder.absolute() / "corpora" / index_name(folder))
        if options.embeddings is None:
            return await wait_in_worker(search, folder, index, query, document, options.passages, _SECONDS.get())
        embedder = embedder_of(context, options.embeddings)
        return await vectors.search(embedder, folder, index, query, document, options.passages, _SECONDS.get())

    return _CorpusSearch(corpus_search)
