"""Schemas of MCP servers, which may be written for other languages, so that arguments can be checked by them here."""

from __future__ import annotations

import re
from typing import Any

from midflight.tools.base import Tool, Toolset

_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""


def readable(schema: Any) -> Any:
    """`schema` without the patterns that Python cannot read, such as `\\p{L}`: the server checks those itself.

    The description has them instead, for who chooses the arguments.

    Raises:
        RecursionError: it is nested too deep.
    """
    if isinstance(schema, list):
        return [readable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _DATA else readable(value) for key, value in schema.items()}
    pattern = found.get("pattern")
    if isinstance(pattern, str) and not _is_read(pattern):
        del found["pattern"]
        found["description"] = f"{found.get('description') or ''} (matches {pattern})".strip()
    return found


def _is_read(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def problem(tool: Tool) -> str:
    """Why no toolset can have this tool; empty where one can."""
    try:
        Toolset([tool])
    except (ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return ""
