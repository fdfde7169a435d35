"""Messages to token ids, segment by segment.

Invariant: each part of a message is tokenised by itself and as plain text, so what spells an added token in a tool's
result, special (`<|im_end|>`) or not (`</think>`), is never that token, and a prompt that repeats another's parts
repeats its ids.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError

from midflight.engines.base import Message

KEPT_CHARACTERS = 4_000_000
"""Of texts whose ids are kept, where each text counts for 20 more: about 50 MB of English."""
_HALVES = re.compile("[\ud800-\udfff]")
_SENTINEL = "\ue000{}\ue001"


class PromptEncoder:
    """Encodes messages with the model's chat template, or as plain text joined by blank lines."""

    def __init__(self, tokenizer: Any, *, chat_template: bool) -> None:
        if chat_template and not tokenizer.chat_template:
            raise ValueError("model.chat_template=true, but this model's tokenizer has none: set it to false")
        self._tokenizer = tokenizer
        self._chat = chat_template
        self._frames: dict[tuple[str, ...], list[list[int]]] = {}
        self._parts: dict[str, list[int]] = {}
        self._kept = 0
        added = {token: str(one.content) for token, one in tokenizer.added_tokens_decoder.items()}
        self._added = {token: text for token, text in added.items() if text.replace("▁", "").strip()}

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` as plain text: no added tokens are recognised, but those of spaces alone.

        Half of a surrogate pair, which JSON and tools can spell and tokenizers refuse, is read as U+FFFD.
        """
        ids = self._parts.get(text)
        if ids is None:
            text = text if text.isascii() else _HALVES.sub("\ufffd", text)
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if not self._added.keys().isdisjoint(ids):  # that splits those alone that are marked as special
                ids = self._without_added(text)
            self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: list[int]) -> None:
        size = len(text) + 20
        if size > KEPT_CHARACTERS:
            return
        if self._kept + size > KEPT_CHARACTERS:
            self._parts.clear()
            self._kept = 0
        self._parts[text] = ids
        self._kept += size

    def _without_added(self, text: str) -> list[int]:
        """Ids of `text` by the tokenizer's steps, but for the first, which looks for added tokens."""
        steps = self._tokenizer.backend_tokenizer
        if steps.normalizer is not None:
            text = steps.normalizer.normalize_str(text)
        words = [text]
        if steps.pre_tokenizer is not None:
            words = [word for word, _ in steps.pre_tokenizer.pre_tokenize_str(text)]
        return [token for word in words for token in self._spelt(word)]

    def _spelt(self, word: str) -> list[int]:
        """Ids of a word. A vocabulary may have an added token as a word of its own: its letters are taken apart."""
        ids: list[int] = []
        for token in self._tokenizer.backend_tokenizer.model.tokenize(word):
            whole = token.value
            if len(whole) > 1 and whole in word and self._added.get(token.id) == whole:
                ids += self._spelt(whole[0]) + self._spelt(whole[1:])
            else:
                ids.append(token.id)
        return ids

    def encode(self, messages: tuple[Message, ...]) -> list[list[int]]:
        """Segments of ids in order: the template's own text, and each part; empty segments are left out.

        Raises:
            ValueError: the chat template takes no messages of these roles.
        """
        frames = self._frame(tuple(message.role for message in messages))
        segments: list[list[int]] = []
        for frame, message in zip(frames, messages, strict=False):
            segments.append(frame)
            segments.extend(self.encode_text(part) for part in message.parts)
        segments.append(frames[-1])
        return [segment for segment in segments if segment]

    def _frame(self, roles: tuple[str, ...]) -> list[list[int]]:
        """What the template puts before, between and after the messages' contents, as ids with control tokens."""
        if roles not in self._frames:
            if self._chat:
                chat = [{"role": role, "content": _SENTINEL.format(i)} for i, role in enumerate(roles)]
                try:
                    text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                except TemplateError as error:
                    raise ValueError(f"the model's chat template takes no {' and '.join(roles)} ({error})") from None
            else:
                text = "\n".join(_SENTINEL.format(i) for i in range(len(roles)))
            pieces = []
            for i in range(len(roles)):
                before, separator, text = text.partition(_SENTINEL.format(i))
                if not separator:
                    raise ValueError(f"the model's chat template drops the message with role {roles[i]!r}")
                pieces.append(before)
            pieces.append(text)
            self._frames[roles] = [
                self._tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else [] for piece in pieces
            ]
        return self._frames[roles]
