"""The passages that match a question: by their words (BM25), or by an engine's vectors where the recipe names one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from midflight.engines.base import Embedder
from midflight.errors import UserError
from midflight.tools.base import ToolError
from midflight.tools.language.asking import asking_an_engine
from midflight.tools.options import ToolContext, ToolOptions
from midflight.tools.reading.passages import excerpt, head, joined, paragraphs
from midflight.tools.worker import run_in_worker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RetrievalOptions(ToolOptions):
    embeddings: str | None = None
    """Name of the engine (`api: embeddings`) whose vectors say which passages match; null: BM25, by their words."""

    @model_validator(mode="after")
    def _engine_is_asked(self) -> Self:
        if self.embeddings is not None and self.cache_hours is not None:
            raise ValueError("cache_hours would keep what an engine may judge otherwise tomorrow; leave one out")
        return self

    @property
    def engines(self) -> frozenset[str | None]:
        return super().engines if self.embeddings is None else super().engines | {self.embeddings}


def embedder_of(context: ToolContext, name: str) -> Embedder:
    """The engine of that name.

    Raises:
        UserError: it gives no vectors.
    """
    engine = context.engine(name)
    if not isinstance(engine, Embedder):
        raise UserError(f"embeddings = {name}: {engine.name} gives no vectors; name an engine with api: embeddings")
    return engine


async def embedded(embedder: Embedder, texts: Sequence[str]) -> NDArray[np.float32]:
    """See `Embedder.embed`.

    Raises:
        ToolError: one of the texts is empty, which servers refuse; and as `asking_an_engine` has it.
    """
    if not all(map(str.strip, texts)):
        raise ToolError("there is nothing to look for; write words")
    with asking_an_engine():
        return await embedder.embed(texts)


async def nearest(embedder: Embedder, passages: Sequence[str], question: str, count: int) -> list[int]:
    """Indexes of the `count` passages whose vectors are nearest to that of the question, best first.

    Raises: as `embedded`.
    """
    vectors = await embedded(embedder, [question, *passages])
    order = (-(vectors[1:] @ vectors[0])).argsort(kind="stable")
    return [int(index) for index in order[:count]]


async def excerpt_by(
    context: ToolContext, embeddings: str | None, text: str, question: str, count: int, most: int
) -> str:
    """`passages.excerpt`, by the vectors of the engine `embeddings` where that is given.

    Raises: as `embedded`.
    """
    if embeddings is None:
        return await run_in_worker(excerpt, text, question, count, most)
    if len(text) <= most or not question.strip():
        return head(text, most)
    passages = await run_in_worker(paragraphs, text)
    return joined(passages, await nearest(embedder_of(context, embeddings), passages, question, count))
