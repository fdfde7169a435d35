"""A server's embedding model, by OpenAI's protocol (platform.openai.com/docs/api-reference/embeddings).

Invariant: as many vectors as texts, in the order of the texts, finite, of one dimension and of length 1; an answer that
is anything else is none, and is asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from midflight.engines.base import EngineGaveUp, GenerateRequest, Generation, PromptTooLong
from midflight.engines.http import Client, Ledger, Malformed, Prices, PromptRefused, said_tokens
from midflight.engines.openai import estimated_tokens
from midflight.engines.served import Endpoint, ServedEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AT_ONCE = 32
"""Texts of a request: what every server takes."""


class EmbeddingEngine(ServedEngine):
    """See `Embedder`. It continues no prompt: `generate` gives up."""

    def __init__(
        self,
        name: str,
        client: Client,
        endpoint: Endpoint,
        *,
        ledger: Ledger | None = None,
        prices: Prices | None = None,
    ) -> None:
        super().__init__(name, endpoint, "text", ledger, prices)
        self.client = client

    def count_tokens(self, text: str) -> int:
        """An estimate; see `estimated_tokens`."""
        return estimated_tokens(text)

    @property
    def vectors(self) -> str:
        return f"{self.client.base_url} {self.endpoint.model}"

    async def generate(self, request: GenerateRequest) -> Generation:
        raise EngineGaveUp(f"{self.name}: an embedding model writes no text")

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed`."""
        import numpy as np

        longest = max(map(self.count_tokens, texts))
        if longest > self.context_length:
            raise PromptTooLong(f"{self.name}: about {longest} tokens exceed context_length {self.context_length}")
        batches = [texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE)]
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._embedded(batch)) for batch in batches]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        found = [task.result() for task in asked]
        dimensions = sorted({rows.shape[1] for rows in found})
        if len(dimensions) > 1:
            raise EngineGaveUp(f"{self.name}: vectors of {dimensions[0]} and of {dimensions[-1]} numbers")
        return np.concatenate(found)

    async def _embedded(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """The vectors of at most `AT_ONCE` texts, by one request that is counted."""
        tokens = sum(map(self.count_tokens, texts))

        def read(answer: Any) -> NDArray[np.float32]:
            took, _ = said_tokens(answer)
            self._count(took or 0)
            rows = read_vectors(answer, len(texts))
            self._count(tokens if took is None else 0, requests=1)
            return rows

        body = {"model": self.endpoint.model, "input": list(texts), "encoding_format": "float"}
        try:
            return await self.client.ask("/embeddings", body, read, tokens=tokens, before=self._before)
        except PromptRefused as error:
            if error.too_long:
                raise PromptTooLong(str(error)) from None
            raise


def read_vectors(answer: Any, count: int) -> NDArray[np.float32]:
    """The vectors of an answer, scaled to length 1, by the place of their texts.

    Raises:
        Malformed: they are not one for each of `count` texts, all numbers, of one dimension and not zero.
    """
    import numpy as np

    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise Malformed("no list of vectors")
    if len(data) != count:
        raise Malformed(f"{len(data)} vectors for {count} texts")
    placed = {entry["index"]: entry.get("embedding") for entry in data if type(entry.get("index")) is int}
    if placed.keys() != set(range(count)):
        raise Malformed("no vector with the index of each text")
    vectors = [placed[place] for place in range(count)]
    for vector in vectors:
        if not isinstance(vector, list) or not vector or not all(type(value) in (int, float) for value in vector):
            raise Malformed("a vector that is no list of numbers")
        if len(vector) != len(vectors[0]):
            raise Malformed(f"vectors of {len(vectors[0])} and of {len(vector)} numbers")
    try:
        rows = np.asarray(vectors, dtype=np.float64)
    except OverflowError:
        raise Malformed("a number out of range in a vector") from None
    with np.errstate(over="ignore"):
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or not lengths.all():
        raise Malformed("a vector without direction")
    unit: NDArray[np.float32] = (rows / lengths).astype(np.float32)
    return unit
