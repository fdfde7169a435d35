"""Equality of numbers within a tolerance; the answer may be a sentence, but with exactly one number in it.

Invariant: what is not unmistakably one finite number scores 0: no guessing which of several was meant.
"""

from __future__ import annotations

import math
import re
import unicodedata

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")
_LEADING = "~\u2248=$\u20ac\u00a3(['\"*"
_TRAILING = ".,;:!?)]'\"*"


def parse_number(text: str) -> float | None:
    """The one number of `text`, or None when there is none, several, or one that is malformed, infinite or not plain.

    Reads thousands separators ("1,234,567"), decimals and exponents ("3.2e7"). Currency signs, quotes and the
    sentence's punctuation around it do not matter; digits stuck to letters or other signs ("12/5", "km2") do.
    """
    plain = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    words = [word for word in plain.split() if any(character.isdigit() for character in word)]
    if len(words) != 1:
        return None
    word = words[0].lstrip(_LEADING).rstrip(_TRAILING).casefold()
    if not _NUMBER.fullmatch(word) or not any(character in "0123456789" for character in word.split("e")[0]):
        return None
    value = float(word.replace(",", ""))
    return value if math.isfinite(value) else None


def numeric(answer: str, expected: str, *, relative_tolerance: float = 1e-6, absolute_tolerance: float = 0.0) -> float:
    """1.0 when |answer - expected| is at most relative_tolerance * |expected| or absolute_tolerance, otherwise 0.0.

    Raises:
        ValueError: `expected` is not a number: the task is at fault.
    """
    right = parse_number(expected)
    if right is None:
        raise ValueError(f"the expected answer {expected!r} is not a number")
    given = parse_number(answer)
    if given is None:
        return 0.0
    return float(abs(given - right) <= max(relative_tolerance * abs(right), absolute_tolerance))
