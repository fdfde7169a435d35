"""Requests in decoding: a row each, and a node for rows that go the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher

from midflight.engines.base import FinishReason, Sampling
from midflight.engines.local.grammar import Masks
from midflight.engines.local.prefixes import Ids


@dataclass
class Row:
    """One request in decoding. `segments` are the prompt's ids in order; `sampling.seed` must be set.

    `spells` says of drawn ids whether a stop string is spelt; None: there are no stop strings.
    """

    segments: list[list[int]]
    sampling: Sampling
    grammar: str | None
    stop_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    supports: list[Ids] = field(default_factory=list)
    finish: FinishReason | None = None
    spells: Callable[[Sequence[int]], bool] | None = None
    gone: bool = False
    """Nobody waits for it any more; said from another thread, at any time."""

    def __post_init__(self) -> None:
        self.prompt: Ids = tuple(token for segment in self.segments for token in segment)
        self.uniforms = np.random.Generator(np.random.Philox(self.sampling.seed))


@dataclass
class Node:
    """Rows that have drawn the same ids from the same prompt under the same rules: one forward serves them all.

    `pending` are the last ids, which the model has not been fed yet; `allowed` [vocabulary] are the tokens that may
    come next (None: all).
    """

    rows: list[Row]
    matcher: LLMatcher | None
    pending: list[int] = field(default_factory=list)
    allowed: np.ndarray | None = None

    @property
    def done(self) -> bool:
        return self.rows[0].finish is not None

    @property
    def fed(self) -> int:
        """How many of the drawn ids the model has been fed."""
        return len(self.rows[0].ids) - len(self.pending)

    def take(self, token: int, logprob: float, *, forced: bool = False, support: Ids = ()) -> None:
        """Give every row its next token; `support` are the tokens it was drawn from, where the sampling truncates."""
        head = self.rows[0]
        if self.matcher is not None:
            self.matcher.consume_token(token)
        stopped = token in head.stop_ids or (self.matcher is not None and self.matcher.is_stopped())
        stopped = stopped or (head.spells is not None and head.spells([*head.ids, token]))
        spent = len(head.ids) + 1 >= head.sampling.max_tokens
        for row in self.rows:
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.forced.append(forced)
            if row.sampling.truncates:
                row.supports.append(support)
            row.finish = FinishReason.STOP if stopped else FinishReason.LENGTH if spent else None
        self.pending.append(token)

    def leave(self) -> None:
        """End it where nobody waits for any of its rows."""
        if not self.done and all(row.gone for row in self.rows):
            for row in self.rows:
                row.finish = FinishReason.LENGTH

    def settle(self, masks: Masks) -> None:
        """Take the tokens on which the grammar leaves no choice: they need no forward to be drawn."""
        while not self.done and self.matcher is not None:
            self.allowed = masks.allowed(self.matcher)
            if np.count_nonzero(self.allowed) != 1:
                break
            self.take(int(self.allowed.argmax()), 0.0, forced=True)
