"""The calculator: exact values, and hostile expressions end at once with a reason."""

import asyncio
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.tools import ErrorKind, ToolError
from midflight.tools.calculator import PATTERN, calculator, evaluate


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("384 * 27 + 15", "10383"),
        ("3.0", "3"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("31989256/1285220", "24.89010131"),
        ("1 / 3", "0.3333333333"),
        ("1 / 30000", "0.00003333333333"),
        ("sqrt(16) + abs(-2)", "6"),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("round(2.567, 2)", "2.57"),
        ("round(1234, -2)", "1200"),
        (" (1 + 2) * 3 ", "9"),
        ("1234567890123 * 1234567890123", "1524157875322755800955129"),
    ],
)
def test_values(expression: str, text: str) -> None:
    assert evaluate(expression) == text


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9**9**9", "too large"),
        ("9" * 60, "too large"),
        ("99999999 ** 99999999", "too large"),
        ("2.5 ** 9999", "too large"),
        ("1,234 + 1", "write 1234, not 1,234"),
        ("(-8) ** 0.5", "no real fractional power"),
        ("sqrt(-1)", "cannot compute"),
        ("round(5, -999999999)", "between -20 and 20"),
        ("__import__('os')", "write numbers"),
        ("x + 1", "write numbers"),
        ("1 + " * 30 + "1", "at most 80"),
        ("(" * 40 + ")" * 40, "cannot compute"),
        ("(" * 39 + "1" + ")" * 38, "cannot read"),
        ("1 +", "cannot read"),
        ("", "write numbers"),
        (" ", "write numbers"),
        ("sqrt", "not a number"),
        ("(1).abs", "operator between"),
        ("5max(1, 2)", "operator between"),
        ("1 2", "cannot read"),
        ("max()", "cannot compute"),
        ("min(2)", "cannot compute"),
        ("5(3)", "cannot"),
        ("*5", "cannot"),
        ("max(*5)", "cannot"),
    ],
)
def test_hostile_or_wrong_expressions_are_bounded(expression: str, reason: str) -> None:
    began = time.monotonic()
    with pytest.raises(ToolError, match=re.escape(reason)):
        evaluate(expression)
    assert time.monotonic() - began < 0.5


def test_nested_powers_at_the_length_limit_are_bounded() -> None:
    began = time.monotonic()
    with pytest.raises(ToolError):
        evaluate("*".join(["99**25"] * 11))
    assert time.monotonic() - began < 0.5


PIECES = [*"0123456789+-*/%(), .", "**", "//", "9", "abs(", "max(", "round(", "sqrt("]


@settings(max_examples=300, deadline=500, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_anything_readable_is_a_number_or_a_reason(pieces: list[str]) -> None:
    try:
        text = evaluate("".join(pieces))
    except ToolError as error:
        assert str(error)
    else:
        assert math.isfinite(float(text))
        assert len(text) <= 52


def test_call_and_pattern() -> None:
    assert asyncio.run(calculator.call({"expression": "2 * 3"}, 1.0)).text == "6"
    assert asyncio.run(calculator.call({"expression": "import os"}, 1.0)).error is ErrorKind.INVALID_ARGUMENTS
    assert asyncio.run(calculator.call({"expression": "1/0"}, 1.0)).error is ErrorKind.TOOL_ERROR
    assert calculator.parameters["properties"]["expression"]["pattern"] == PATTERN
    assert not calculator.blocking
