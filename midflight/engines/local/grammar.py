"""Grammar masks over the vocabulary, the same for sampler and trainer (llguidance).

Invariant: `Masks.replay(grammar, ids)` gives, position by position, the mask the sampler drew `ids` under.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher

KEPT_BYTES = 2**28
"""Of replayed masks: an eighth of the vocabulary for each token of a row. More than the rows of a pack take."""


class GrammarError(ValueError):
    """The grammar does not compile, or the ids do not obey it."""


class Masks:
    """Compiles grammars for one tokenizer and walks them. `vocabulary` is the width of the model's logits."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary)
        self.vocabulary = vocabulary
        self._replays: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self._kept = 0

    def start(self, grammar: str) -> LLMatcher:
        """A fresh walk of `grammar`.

        Raises:
            GrammarError: the grammar does not compile.
        """
        return self._compile(grammar).deep_copy()

    def check(self, grammar: str) -> None:
        """Compile `grammar`.

        Raises:
            GrammarError: it does not compile.
        """
        self._compile(grammar)

    @lru_cache(maxsize=1024)  # noqa: B019 - one Masks lives as long as its model
    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise GrammarError(f"grammar does not compile: {matcher.get_error()}")
        return matcher

    def spells(self, stop: tuple[str, ...], ids: Sequence[int]) -> bool:
        """Whether one of `stop` is in the text of `ids`, byte by byte: a character may be spelt by several tokens."""
        text = self._tokenizer.decode_bytes(list(ids))
        return any(one.encode("utf-8", "surrogatepass") in text for one in stop)

    def allowed(self, matcher: LLMatcher) -> np.ndarray:
        """Boolean [vocabulary]: the tokens that may come next."""
        raw = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(raw, bitorder="little", count=self.vocabulary).view(bool)

    def _replayed(self, grammar: str, ids: tuple[int, ...]) -> np.ndarray:
        """Packed masks [len(ids), vocabulary / 8]; the oldest are dropped where all take more than KEPT_BYTES."""
        found = self._replays.get((grammar, ids))
        if found is None:
            found = self._walked(grammar, ids)
            self._replays[grammar, ids] = found
            self._kept += found.nbytes
            while self._kept > KEPT_BYTES and len(self._replays) > 1:
                self._kept -= self._replays.pop(next(iter(self._replays))).nbytes
        return found

    def _walked(self, grammar: str, ids: tuple[int, ...]) -> np.ndarray:
        matcher = self.start(grammar)
        masks = []
        for position, token in enumerate(ids):
            mask = self.allowed(matcher)
            if not mask[token]:
                raise GrammarError(f"token {token} at position {position} breaks the grammar it was drawn under")
            masks.append(np.packbits(mask, bitorder="little"))
            matcher.consume_token(token)
        return np.stack(masks)

    def forced(self, grammar: str, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """For each of `ids`, a whole text of `grammar`: whether the grammar left no choice.

        Raises:
            GrammarError: an id breaks the grammar, or the grammar wants more.
        """
        matcher = self.start(grammar)
        found = []
        for position, token in enumerate(ids):
            mask = self.allowed(matcher)
            if not mask[token]:
                raise GrammarError(f"token {token} at position {position} breaks the grammar")
            found.append(int(np.count_nonzero(mask)) == 1)
            matcher.consume_token(token)
        if not matcher.is_stopped():
            raise GrammarError(f"the text ends before the grammar does, after {len(ids)} tokens")
        return tuple(found)

    def replay(self, grammar: str, ids: tuple[int, ...]) -> torch.Tensor:
        """Boolean [len(ids), vocabulary]: the masks `ids` were drawn under.

        Raises:
            GrammarError: an id breaks the grammar.
        """
        return torch.from_numpy(np.stack([self.at(grammar, ids, position) for position in range(len(ids))]))

    def forget_replays(self) -> None:
        """Drop the masks kept by `replay` and `at`: an update's rows do not come back after it."""
        self._replays.clear()
        self._kept = 0

    def at(self, grammar: str, ids: tuple[int, ...], position: int) -> np.ndarray:
        """Boolean [vocabulary]: the mask `ids[position]` was drawn under.

        Raises:
            GrammarError: an id breaks the grammar.
        """
        packed = self._replayed(grammar, ids)[position]
        return np.unpackbits(packed, bitorder="little", count=self.vocabulary).view(bool)
