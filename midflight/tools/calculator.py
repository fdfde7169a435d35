"""The calculator: arithmetic on numbers, read by simpleeval and bounded in length, power and size.

Invariant: no expression takes more than milliseconds, reads a name, or gives a result of more than 50 digits.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Annotated

from pydantic import Field
from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

from midflight.tools.base import ToolError, one_line
from midflight.tools.function import tool
from midflight.tools.text import format_number

MAX_LENGTH = 80
"""Characters of an expression."""
MAX_DIGITS = 50
"""Digits of a whole result."""
PATTERN = rf"^([0-9+\-*/%(), .]|abs|min|max|round|sqrt){{1,{MAX_LENGTH}}}$"
"""What the calculator can read: digits, operators, parentheses and the five functions."""

_READABLE = re.compile(PATTERN)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub)


def _power(base: float, exponent: float) -> float:
    """`base ** exponent`, refused before it is computed when the result would be too large."""
    if abs(base) > 1 and exponent * math.log10(abs(base)) > MAX_DIGITS:
        raise ToolError(f"the power is too large: more than {MAX_DIGITS} digits")
    result = base**exponent
    if isinstance(result, complex):
        raise ToolError("a negative number has no real fractional power")
    return float(result) if isinstance(result, float) else int(result)


def _round(value: float, digits: int = 0) -> float:
    """Half to even, as Python rounds; digits at most 20 either way, for 10**digits is computed."""
    if not isinstance(digits, int) or abs(digits) > 20:
        raise ToolError("round takes a whole number of digits between -20 and 20")
    return round(value, digits) if digits else round(value)


def evaluate(expression: str) -> str:
    """The value of `expression` as text.

    Raises:
        ToolError: what cannot be read or computed, with the reason.
    """
    expression = expression.strip()
    if not _READABLE.fullmatch(expression) or len(expression) > MAX_LENGTH:
        raise ToolError(
            f"write numbers, + - * / // % ** ( ) and abs min max round sqrt, at most {MAX_LENGTH} characters"
        )
    if re.search(r"[0-9.][a-z]", expression):
        raise ToolError("put an operator between a number and a function")
    evaluator = SimpleEval(
        operators={kind: DEFAULT_OPERATORS[kind] for kind in _OPERATORS} | {ast.Pow: _power},
        functions={"abs": abs, "min": min, "max": max, "round": _round, "sqrt": math.sqrt},
        names={},
    )
    try:
        tree = evaluator.parse(expression)
        if isinstance(tree, ast.Expr):
            tree = tree.value
        if "," in expression and any(isinstance(node, ast.Tuple) for node in ast.walk(tree)):
            raise ToolError("a comma only separates the arguments of min, max and round: write 1234, not 1,234")
        value = evaluator.eval(expression, previously_parsed=tree)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except SyntaxError as error:
        raise ToolError(f"cannot read {expression!r}: {error.msg}") from None
    except (InvalidExpression, ArithmeticError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(one_line(f"cannot compute {expression!r}: {error}")) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{expression!r} is not a number")
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ToolError(f"the result is too large: more than {MAX_DIGITS} digits")
    if not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    return format_number(value)


@tool(blocking=False)
def calculator(
    expression: Annotated[str, Field(pattern=PATTERN, description="such as (120 + 30) / 4; no thousands separators")],
) -> str:
    """value of an arithmetic expression"""
    return evaluate(expression)
