"""What a message about a slip may show of what the user gave: a key may stand where none belongs.

Invariant: of a value that may be a key, the place alone is shown; and what has the form of a key is in no message.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_NAMES = (
    r"(?:(?:api|access|auth|secret)[_-]?)?"
    r"(?:keys?|token|secrets?|passwords?|passwd|authorization|bearer|credentials?)"
)
SECRET = re.compile(rf"(?:^|[._-]){_NAMES}(?:$|[._-])|^engines\..*\.base_url", re.IGNORECASE)
"""Places of values that are a secret, or may hold one by mistake."""
_NAMED = re.compile(rf"(?<![a-z0-9]){_NAMES}(?![a-z0-9])['\"]?[\s:=,]+\S", re.IGNORECASE)
"""Within a value: such a name, and something behind it."""
_KEY = re.compile(
    r"(?<![\w/-])(?:"
    r"(?:sk|csk|tvly|xai|pplx|nvapi|glpat)-(?=[\w-]*\d)[\w-]{8,}"
    r"|(?:gsk|hf|ghp|gho|github_pat|jina|fw|r8)_\w{20,}|AIza[\w-]{30,}|AKIA[0-9A-Z]{16}"
    r")(?![\w/-]|\.(?:ya?ml|jsonl?|csv|txt|py)\b)"
    r"|(?<=bearer )(?=\S*\d)[\w.~+/=-]{8,}"
    r"|(?<=://)[^\s/@]+(?=@)",
    re.IGNORECASE,
)
"""The forms of keys that services give, and a user in an address."""
_PLACE = re.compile(r"[a-z_]+(?:\.[a-z0-9_-]+)*(?![\w.-])")


def may_be_secret(place: str, value: object = None) -> bool:
    """Whether the value at a dotted place may be a key, by the names of the place or within the value."""
    return SECRET.search(place) is not None or (value is not None and _NAMED.search(str(value)) is not None)


def stated(place: str, value: object, text: Callable[[object], str] = str) -> str:
    """`place = value`, with the value as `text` writes it; of what may be a secret the place alone."""
    return place if may_be_secret(place, value) else f"{place} = {text(value)}"


def place_in(text: str) -> str:
    """The dotted key that `text` begins with, up to a name of a secret, for what follows may be one; else empty."""
    found = _PLACE.match(text)
    parts = found[0].split(".") if found else []
    for index, part in enumerate(parts):
        if SECRET.search(part):
            return ".".join([*parts[:index], part.partition("-")[0]])
    return ".".join(parts)


def without_keys(text: str) -> str:
    """`text` with `[key]` for what has the form of a key."""
    return _KEY.sub("[key]", text)


def unquoted(reason: object) -> str:
    """What a parser says, without the words it quotes; single characters and its own names, as `<stream end>`, stay."""
    return re.sub(r"'[^']*'", lambda found: found[0] if len(found[0]) < 5 or "<" in found[0] else "'...'", str(reason))
