"""Keys taken out of text, in one place.

Invariant: it comes before any cutting, for part of a key would not be found; and it is done to texts as they are read,
not to the JSON they came in, which may spell a key in another way, or a name of its own as a key.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any
from urllib.parse import quote

HIDDEN = "[key]"
SHORTEST_KEY = 8
"""Characters: to take a shorter value out would change texts that have it by chance."""
_KEPT = "/+=:@"
"""Signs of keys that addresses may have as they are."""
SHORTEST_PART = 4
"""Characters of the beginning of a key that are hidden where a text was cut."""
PLACEHOLDERS = frozenset(
    "anything changeme dummy-key fake-key lm-studio my-api-key my_api_key no-api-key no-key-required not-needed "
    "not-required not-used password placeholder sk-no-key-required token-abc123 undefined your-api-key "
    "your_api_key".split()
)
"""What servers that ask for no key are given, as far as it is not too short anyway; in small letters."""


def is_secret(value: str) -> bool:
    """Whether it can be a key: neither short nor a placeholder such as `EMPTY`, `none` or `not-needed`."""
    return len(value) >= SHORTEST_KEY and value.lower() not in PLACEHOLDERS


def redact(text: str, keys: Iterable[str | None]) -> str:
    """`text` without those of `keys` that are secrets, however they are quoted."""
    return _replaced(text, spellings(keys))


def redact_cut(text: str, keys: Sequence[str]) -> str:
    """As `redact`, of a text that others may have cut with `...` in the middle of a key."""
    text = redact(text, keys)
    if text.endswith("..."):
        for key in spellings(keys):
            for length in range(len(key) - 1, SHORTEST_PART - 1, -1):
                if text.endswith(f"{key[:length]}..."):
                    return f"{text[: -length - 3]}{HIDDEN}..."
    return text


def redact_all(value: Any, keys: Iterable[str | None]) -> Any:
    """A JSON value, every text of it as by `redact`.

    Raises:
        RecursionError: it is nested too deep.
    """
    found = spellings(keys)
    return _without(value, found) if found else value


def spellings(keys: Iterable[str | None]) -> list[str]:
    """Those of `keys` that are secrets, as they are and as texts quote them; the longest first, for one may be part of
    another."""
    found = {spelt for key in keys if key and is_secret(key) for spelt in _spellings(key)}
    return sorted(found, key=lambda spelt: (-len(spelt), spelt))


@lru_cache(maxsize=256)
def _spellings(key: str) -> frozenset[str]:
    """In addresses, HTML, JSON within text and Python: the key alone, where it is of letters, digits, `-` and `_`."""
    quoted = json.dumps(key)[1:-1]
    kept = [sign for sign in _KEPT if sign in key]  # each of these is escaped by some and left by others
    urls = {quote(key, safe="".join(some)) for count in range(len(kept) + 1) for some in combinations(kept, count)}
    urls |= {re.sub("%..", lambda code: code[0].lower(), url) for url in urls}
    slashed = {key.replace("/", "\\/"), quoted.replace("/", "\\/")}
    pages = {html.escape(key), html.escape(key, quote=False)}
    for code in ("&#{};", "&#x{:x};", "&#x{:X};"):
        pages.add("".join(code.format(ord(sign)) if sign in "/+=" else sign for sign in key))
    return frozenset({key, quoted, *urls, *slashed, *pages, repr(key)[1:-1]})


def _replaced(text: str, spelt: list[str]) -> str:
    for one in spelt:
        text = text.replace(one, HIDDEN)
    return text


def _without(value: Any, keys: list[str]) -> Any:
    if isinstance(value, str):
        return _replaced(value, keys)
    if isinstance(value, list):
        return [_without(one, keys) for one in value]
    if isinstance(value, dict):
        return {_without(name, keys): _without(one, keys) for name, one in value.items()}
    return value
