"""The thought that a reasoning model begins its answer with, where the server leaves it in."""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def said(text: str) -> str:
    """`text` without blank lines in front of it, and without the thought that reasoning models begin with.

    That is one whole block, `<think>` to `</think>`, as they leave it where their server does not take it out.
    """
    if text[:1].isspace():
        text = text.lstrip()
    if text.startswith("<think>"):
        thought = _THOUGHT.match(text)
        text = text[thought.end() :] if thought else text
    return text
