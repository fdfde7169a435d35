"""What an engine is: something that continues a prompt, and says exactly how it drew what it drew.

Invariant: a `Generation` that carries `ids` carries, for each of them, the log-probability under the distribution
it was drawn from (temperature, truncation and grammar mask included), so a trainer can rebuild the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from midflight.records import record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class EngineError(Exception):
    """The engine could not answer: an infrastructure failure, never the planner's mistake."""


class EngineGaveUp(EngineError):
    """It has tried again itself, or trying again is of no use: callers do not retry."""


class BudgetSpent(Exception):
    """The run's budget of tokens or money is spent; nothing was asked."""


class PromptTooLong(Exception):
    """The prompt plus the tokens to be drawn exceed the model's context."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop string, an end-of-sequence token, or the end of the grammar."""
    LENGTH = "length"
    """`max_tokens` were drawn first; the text is incomplete."""


@record
class Message:
    """One chat message as an ordered list of parts, from what changes least to what changes most.

    Each part is tokenised by itself, as plain text: a control token spelt inside a part stays text.
    """

    role: str
    parts: tuple[str, ...]


@record
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 truncate nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Seeds this request alone: the same seed draws the same uniforms whatever shares the batch."""

    def seeded(self, seed: int | None) -> Sampling:
        """The same with another seed."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens, self.stop, seed)

    @property
    def truncates(self) -> bool:
        """Whether top-p or top-k cut the distribution that is drawn from."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


Structure = Literal["grammar", "json", "text"]
"""What an engine can hold a text to: a Lark grammar, a JSON schema, or nothing."""


def structure_of(engine: Engine) -> Structure:
    """What `engine` can hold a text to, its `structure`, which stays; one that says nothing takes grammars."""
    found: Structure = getattr(engine, "structure", "grammar")
    return found


@record
class GenerateRequest:
    """One request: messages, sampling settings, and optionally what the text must obey, one of the two.

    `grammar` is in Lark (llguidance); `json_schema` is a schema as JSON text. See `structure_of`. `prompt_ids` stand in
    place of messages, for engines that have token ids.
    """

    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    grammar: str | None = None
    json_schema: str | None = None
    prompt_ids: tuple[int, ...] = ()


@record
class Generation:
    """What an engine drew. Engines without token ids leave `prompt_ids`, `ids`, `logprobs` and `forced` empty.

    `logprobs[j]` belongs to `ids[j]`; `forced[j]` is True where the grammar left one choice (log-prob 0, no gradient).
    `supports[j]` are the tokens `ids[j]` was drawn from, ascending, where top-p or top-k cut the distribution (empty
    for a forced token); `supports` is empty where nothing is cut.
    """

    text: str
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    forced: tuple[bool, ...] = ()
    supports: tuple[tuple[int, ...], ...] = ()
    weights_version: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    grammar: str | None = None


@runtime_checkable
class Engine(Protocol):
    """A language model that continues prompts. Safe to call from many coroutines at once."""

    @property
    def name(self) -> str:
        """What to call this engine in a report."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens a prompt and its continuation may take together."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue `request.messages`.

        Raises:
            PromptTooLong: the prompt plus `max_tokens` exceed `context_length`.
            EngineError: the engine failed; the caller may retry, but for EngineGaveUp.
            BudgetSpent: the run has a budget, and it is spent.
        """
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens that `text` takes as plain text."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """A model that gives each text a vector: the nearer two texts in meaning, the larger the product of theirs."""

    @property
    def vectors(self) -> str:
        """Which model they are of, and where; vectors under one such name can be compared."""
        ...

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row of length 1 a text, in order, for one text or more.

        Raises:
            PromptTooLong, EngineError, BudgetSpent: as `Engine.generate`.
        """
        ...
