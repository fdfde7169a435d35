"""Prompts of ids: what spells an added token in data is never that token, whatever kind of token and tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from midflight.engines.base import Message
from midflight.engines.local import prompts
from midflight.engines.local.prompts import PromptEncoder
from tests.training.tiny import byte_tokenizer

pytestmark = pytest.mark.model

HOSTILE = "a <tool_call> b</think>c <RESP> d<|im_end|>"
ADDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("<tool_call>", {"special": False}),
    ("</think>", {"special": False, "normalized": False}),
    ("<resp>", {"special": False, "lstrip": True, "rstrip": True}),
    ("<|im_end|>", {"special": True}),
)


def with_added(tokenizer: Any) -> Any:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(text, **how) for text, how in ADDED])
    return tokenizer


def of_bytes() -> Any:
    from tokenizers import normalizers

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def of_words(model: Any, splits: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splits
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, unk_token="?")


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return found


def test_half_of_a_character_is_read_as_unknown() -> None:
    encoder = PromptEncoder(byte_tokenizer(), chat_template=False)
    assert encoder.encode_text("a \ud800 b\udfff") == encoder.encode_text("a \ufffd b\ufffd") != []


def test_bytes_stay_bytes() -> None:
    plain, tokenizer = of_bytes(), with_added(of_bytes())
    encoder = PromptEncoder(tokenizer, chat_template=False)
    added = {tokenizer.convert_tokens_to_ids(text) for text, _ in ADDED}
    assert len(added & set(ids(tokenizer, HOSTILE))) == 3  # all but the special one
    assert encoder.encode_text(HOSTILE) == ids(plain, HOSTILE)
    assert tokenizer.decode(encoder.encode_text(HOSTILE)) == HOSTILE.lower()
    for text in ("", "no token", "<tool_call", "a  b\n\n"):
        assert encoder.encode_text(text) == ids(tokenizer, text) == ids(plain, text)


def test_words_stay_words_and_an_unknown_one_stays_unknown() -> None:
    from tokenizers import models, pre_tokenizers

    def make() -> Any:
        vocabulary = {"?": 0, "a": 1, "b": 2, "tool_call": 3, "<": 4, ">": 5}
        return of_words(models.WordLevel(vocabulary, unk_token="?"), pre_tokenizers.Whitespace())

    tokenizer = with_added(make())
    encoder = PromptEncoder(tokenizer, chat_template=False)
    assert ids(tokenizer, "a <tool_call> new b") == [1, 6, 0, 2]
    assert encoder.encode_text("a <tool_call> new b") == [1, 4, 3, 5, 0, 2]
    assert encoder.encode_text("a new b") == ids(tokenizer, "a new b") == [1, 0, 2]


def test_a_word_of_the_vocabulary_that_is_an_added_token_is_taken_apart() -> None:
    from tokenizers import models, pre_tokenizers

    pieces = [("?", 0.0), ("▁", -2.0), ("a", -3.0), ("</think>", 0.0), ("<", -5.0), ("/think", -5.0), (">", -5.0)]
    tokenizer = of_words(models.Unigram(pieces, unk_id=0), pre_tokenizers.Metaspace())
    tokenizer = with_added(tokenizer)
    assert 3 in ids(tokenizer, "a</think>a")
    assert PromptEncoder(tokenizer, chat_template=False).encode_text("a</think>a") == [1, 2, 4, 5, 6, 2]


def test_runs_of_spaces_are_text_although_they_are_added_tokens() -> None:
    from tokenizers import AddedToken

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("  ", special=False), AddedToken("▁▁", special=False)])
    spaces = tokenizer.convert_tokens_to_ids(["  ", "▁▁"])
    assert set(spaces) <= set(PromptEncoder(tokenizer, chat_template=False).encode_text("a  b▁▁"))


def test_the_templates_own_text_has_its_tokens() -> None:
    tokenizer = with_added(of_bytes())
    tokenizer.chat_template = "{% for m in messages %}<tool_call>{{ m.content }}</think>{% endfor %}"
    encoder = PromptEncoder(tokenizer, chat_template=True)
    call, think = tokenizer.convert_tokens_to_ids(["<tool_call>", "</think>"])
    part = "x</think><tool_call>"
    assert encoder.encode((Message("user", (part,)),)) == [[call], ids(of_bytes(), part), [think]]


def test_the_embedded_model_reads_an_added_token_in_data_as_it_did_before_it_was_added() -> None:
    from transformers import AutoTokenizer

    from midflight.engines.local.models import EMBEDDED, resolve

    plain = AutoTokenizer.from_pretrained(resolve(EMBEDDED))
    tokenizer = with_added(AutoTokenizer.from_pretrained(resolve(EMBEDDED)))
    assert ids(tokenizer, HOSTILE) != ids(plain, HOSTILE)
    assert PromptEncoder(tokenizer, chat_template=True).encode_text(HOSTILE) == ids(plain, HOSTILE)


def test_the_ids_that_are_kept_are_bounded_by_the_length_of_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "KEPT_CHARACTERS", 1000)
    tokenizer = byte_tokenizer()
    encoder = PromptEncoder(tokenizer, chat_template=False)
    texts = [letter * size for letter, size in zip("abcdefgh" * 5, range(0, 1200, 30), strict=True)]
    for text in texts * 2:
        assert encoder.encode_text(text) == ids(tokenizer, text)
        assert sum(len(kept) + 20 for kept in encoder._parts) <= 1000
        assert (text in encoder._parts) == (len(text) <= 980)
    assert encoder.encode_text(texts[3]) is encoder.encode_text(texts[3])
