"""Equality of texts after the normalisation of SQuAD: case, articles, punctuation and spacing do not count.

Unlike SQuAD's, it keeps what makes a number: "-5" is not "5" and "3.5" is not "35".
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

_PUNCTUATION = re.compile(
    rf"(?<![0-9])\.(?![0-9])|(?<=[0-9])\.(?![0-9])|[{re.escape(string.punctuation.replace('.', '').replace('-', ''))}]"
)
_HYPHEN = re.compile(r"(?<!\S)-(?![0-9])|(?<=\S)-")
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """NFKC, casefold, no ASCII punctuation, no English articles, single spaces.

    A text of nothing else keeps its characters, so that "The" and "An" stay different.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-").replace("\u2019", "'")
    bare = _ARTICLE.sub(" ", _HYPHEN.sub("", _PUNCTUATION.sub("", plain)))
    return " ".join(bare.split()) or " ".join(plain.split())


def exact(answer: str, expected: str, *, aliases: Sequence[str] = ()) -> float:
    """1.0 when the answer equals the expected text or one of its aliases after `normalise`, otherwise 0.0."""
    given = normalise(answer)
    return float(given != "" and any(given == normalise(right) for right in (expected, *aliases)))
