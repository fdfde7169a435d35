"""Model text to values, strictly: what is not exactly one JSON object of the wanted fields is refused.

Invariant: nothing is repaired. What stands around an answer and is no part of it is left out (`said`). Whatever the
text, the result is the value it spells or a ValueError, never another one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from midflight.engines.base import FinishReason, Generation
from midflight.engines.thoughts import said

__all__ = ["object_schema", "parse_fields", "parse_object", "said"]

_FENCED = re.compile(r"```(?:json)?\n(.*)\n```\s*", re.DOTALL)


def parse_object(generation: Generation) -> dict[str, Any]:
    """The JSON object that a text is, be it in a fence (```json); see also `said`.

    Raises:
        ValueError: it is cut off, or no JSON object; or a key appears twice, a number is larger than any float, or a
            text in it is no Unicode.
    """
    if generation.finish_reason is FinishReason.LENGTH:
        raise ValueError("the text was cut off by the token limit")
    text = said(generation.text)
    fenced = _FENCED.fullmatch(text) if text.startswith("```") else None
    try:
        value = json.loads(
            fenced[1] if fenced else text, parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_unique
        )
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it has half of a character") from None
    if not isinstance(value, dict):
        raise ValueError(f"got a {type(value).__name__}")
    return value


def parse_fields(generation: Generation, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The object whose keys are those of `fields` and whose values fit: a type, or a collection that has the value.

    Raises:
        ValueError: see `parse_object`; or keys or values are others.
    """
    value = parse_object(generation)
    if value.keys() != fields.keys():
        raise ValueError(f"its keys are not {', '.join(fields)}")
    for name, wanted in fields.items():
        fits = type(value[name]) is wanted if isinstance(wanted, type) else value[name] in wanted
        if not fits:
            raise ValueError(f"{name} is not as asked for")
    return value


def object_schema(properties: Mapping[str, Any]) -> str:
    """A JSON schema, as text, of an object with all of these properties and no other."""
    schema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps(schema)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result
