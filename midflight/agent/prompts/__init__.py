"""Prompt templates: one plain text file a module. `{name}` marks are filled by `fill`; other braces stay."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def template(name: str) -> str:
    """The text of `name`.txt.

    Raises:
        FileNotFoundError: no such template.
    """
    return (files(__name__) / f"{name}.txt").read_text(encoding="utf-8")


def fill(text: str, **values: str) -> str:
    """Put values for their marks, in one pass: a mark spelt inside a value stays as it is."""
    return re.sub(r"\{([a-z_]+)\}", lambda match: values.get(match[1], match[0]), text)
