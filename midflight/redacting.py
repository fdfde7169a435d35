"""Keys taken out of text, in one place.

Invariant: it comes before any cutting, for part of a key would not be found.
"""

from __future__ import annotations

from collections.abc import Iterable

HIDDEN = "[key]"


def redact(text: str, keys: Iterable[str | None]) -> str:
    """`text` without any of `keys`; empty ones are none."""
    for key in sorted(filter(None, keys), key=len, reverse=True):  # one may be part of another
        text = text.replace(key, HIDDEN)
    return text
