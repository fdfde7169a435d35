"""Keys taken out of text, in one place.

Invariant: it comes before any cutting, for part of a key would not be found; and it is done to texts as they are read,
not to the JSON they came in, which may spell a key in another way, or a name of its own as a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

HIDDEN = "[key]"
SHORTEST_KEY = 8
"""Characters: to take a shorter value out would change texts that have it by chance."""
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
    """`text` without those of `keys` that are secrets."""
    for key in _secrets(keys):
        text = text.replace(key, HIDDEN)
    return text


def redact_cut(text: str, keys: Sequence[str]) -> str:
    """As `redact`, of a text that others may have cut with `...` in the middle of a key."""
    text = redact(text, keys)
    if text.endswith("..."):
        for key in _secrets(keys):
            for length in range(len(key) - 1, SHORTEST_PART - 1, -1):
                if text.endswith(f"{key[:length]}..."):
                    return f"{text[: -length - 3]}{HIDDEN}..."
    return text


def redact_all(value: Any, keys: Iterable[str | None]) -> Any:
    """A JSON value, every text of it as by `redact`.

    Raises:
        RecursionError: it is nested too deep.
    """
    found = _secrets(keys)
    return _without(value, found) if found else value


def _secrets(keys: Iterable[str | None]) -> list[str]:
    """The longest first, for one may be part of another."""
    return sorted((key for key in keys if key and is_secret(key)), key=len, reverse=True)


def _without(value: Any, keys: list[str]) -> Any:
    if isinstance(value, str):
        return redact(value, keys)
    if isinstance(value, list):
        return [_without(one, keys) for one in value]
    if isinstance(value, dict):
        return {_without(name, keys): _without(one, keys) for name, one in value.items()}
    return value
