"""Masks that are walked again for the trainer: the sampler's, once a row, and never more of them than a bound."""

from __future__ import annotations

import numpy as np
import pytest

from midflight.engines.local import grammar
from midflight.engines.local.grammar import GrammarError, Masks
from tests.training.tiny import byte_tokenizer

pytestmark = pytest.mark.model

GRAMMAR = 'start: "x" /[a-c]{1,9}/ "y"\n'


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().convert_tokens_to_ids(list(text)))


def test_replayed_masks_are_bounded_in_bytes_and_each_row_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(byte_tokenizer(), 257)
    row_bytes = 4 * 33  # four tokens, an eighth of 257 words each
    monkeypatch.setattr(grammar, "KEPT_BYTES", 3 * row_bytes)
    walked: list[tuple[int, ...]] = []
    walk = masks._walked

    def noted(text: str, ids: tuple[int, ...]) -> np.ndarray:
        walked.append(ids)
        return walk(text, ids)

    monkeypatch.setattr(masks, "_walked", noted)
    rows = [ids_of(f"x{letters}y") for letters in ("aa", "ab", "ac", "ba", "bb")]
    for ids in rows:
        allowed = [masks.at(GRAMMAR, ids, position) for position in range(4)]
        assert [int(mask.sum()) for mask in allowed] == [1, 3, 4, 4]
        assert all(mask[token] for mask, token in zip(allowed, ids, strict=True))
        assert masks._kept == sum(kept.nbytes for kept in masks._replays.values()) <= 3 * row_bytes
    assert walked == rows
    masks.at(GRAMMAR, rows[2], 0)
    assert walked == rows
    masks.at(GRAMMAR, rows[0], 0)
    assert walked == [*rows, rows[0]]
    longer = ids_of("xabcabcabcy")  # alone over the bound: kept all the same, while it is asked for
    for position in range(11):
        masks.at(GRAMMAR, longer, position)
    assert walked[6:] == [longer]
    masks.forget_replays()
    assert masks._kept == 0 and masks._replays == {}


def test_ids_that_break_the_grammar_are_named() -> None:
    masks = Masks(byte_tokenizer(), 257)
    with pytest.raises(GrammarError, match="at position 2 breaks the grammar it was drawn under"):
        masks.replay(GRAMMAR, ids_of("xaz"))
