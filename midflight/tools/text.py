"""What a tool's return value looks like as text: short, plain, and the same value always the same text."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal

from pydantic_core import to_jsonable_python

_TAG = re.compile(r"</?\w[^<>]*>")
"""Takes time in proportion to the text, whatever it holds."""


def without_tags(text: str, instead: str = "") -> str:
    """`text` with `instead` for each tag of HTML or XML."""
    return _TAG.sub(instead, text)


def format_number(value: int | float) -> str:
    """Plain digits, at most 10 significant ones for a float that is not whole: 3.0 gives "3", 1/3 gives "0.3333333333".

    Below 1e-6 and from 1e16 on, a float is written with an exponent.
    """
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 2**53:
        return str(int(value))
    rounded = f"{value:.10g}"
    if "e" in rounded and 1e-6 <= abs(value) < 1e16:
        return format(Decimal(rounded), "f")
    return rounded


def result_text(value: object) -> str:
    """A string as it is, numbers by `format_number`, everything else as JSON (what JSON lacks, by `str`)."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value)
    return json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)
