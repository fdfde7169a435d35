"""What engines on servers have in common: what is asked of a server, who asks it, and what that may cost."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Self

from midflight.engines.base import GenerateRequest, Generation, Structure
from midflight.engines.http import Ledger, Prices, Usage

Structured = Literal["none", "json_schema", "json_object", "grammar"]
GUIDANCE = "%llguidance {}\n"
"""The beginning of a grammar that vLLM's guidance backend takes and its others refuse: unasked it takes the first that
reads a grammar, xgrammar, which draws under other masks, and keeps to the backend of its first request."""


@dataclass(frozen=True)
class Endpoint:
    """What is asked of a server.

    Args:
        model: as the server calls it.
        api: `chat` has the server apply a chat template; `completions` continues plain text; `embeddings` is for
            `EmbeddingEngine`.
        structured: what the server can hold a text to: `json_schema` (`response_format` as OpenAI has it),
            `json_object` (as llama.cpp has it), `grammar` (vLLM's `structured_outputs` with Lark grammars), or nothing.
        context_length: most tokens of prompt and answer.
        max_tokens_field: what the server calls the most new tokens.
        top_k: the server knows `top_k`.
    """

    model: str
    api: Literal["chat", "completions", "embeddings"] = "chat"
    structured: Structured = "none"
    context_length: int = 32_768
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    top_k: bool = False


class ServedEngine(ABC):
    """An engine on a server, as one module sees it.

    `for_module` gives another view of the same engine: connections, limits, cache and ledger are shared.
    """

    def __init__(
        self, name: str, endpoint: Endpoint, structure: Structure, ledger: Ledger | None, prices: Prices | None
    ) -> None:
        self.endpoint = endpoint
        self.structure = structure
        self.ledger = ledger or Ledger()
        self._name, self._module = name, ""
        self._prices = prices or Prices()

    def for_module(self, module: str) -> Self:
        """The same engine, whose use is counted as that of `module`."""
        view = copy.copy(self)
        view._module = module
        return view

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self.endpoint.context_length

    @abstractmethod
    def count_tokens(self, text: str) -> int:
        """See `Engine.count_tokens`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""

    def _before(self, attempt: int) -> None:
        """Lets no attempt through once the budget is spent, and counts retries."""
        self.ledger.check()
        self._count_retry(attempt)

    def _count_retry(self, attempt: int) -> None:
        if attempt > 1:
            self._count(retries=1)

    def _count(
        self, prompt: int = 0, completion: int = 0, *, requests: int = 0, retries: int = 0, cached: int = 0
    ) -> None:
        """Count at once: another attempt, or another request, is to find the budget spent."""
        if requests or retries or cached or prompt or completion:
            used = Usage(requests, retries, cached, prompt, completion, self._prices.of(prompt, completion))
            self.ledger.add(self._module, self._name, used)
