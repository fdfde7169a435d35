"""Numbers in answers: one, finite, within tolerance."""

import pytest

from midflight.rewards import numeric
from midflight.rewards.numeric import parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("31989256", 31989256.0),
        ("31,989,256", 31989256.0),
        ("The population is 31,989,256.", 31989256.0),
        ("3.2e7", 3.2e7),
        ("-1.5E-3", -1.5e-3),
        ("\u22125", -5.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("$12", 12.0),
        ("about ~12 km", 12.0),
        ("\uff11\uff12", 12.0),
        ("(42)", 42.0),
        ("", None),
        ("none", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("9" * 400, None),
        ("3 or 4", None),
        ("1,2,3", None),
        ("12,34", None),
        ("1,234,56", None),
        ("12/5", None),
        ("1.2.3", None),
        ("5km2", None),
        ("1 234", None),
        ("e5", None),
        ("1.5 km2", None),
        ("0x10", None),
        ("--5", None),
        ("\u0665", None),
        ("10%", None),
    ],
)
def test_parse_number(text: str, value: float | None) -> None:
    assert parse_number(text) == value


def test_tolerances() -> None:
    assert numeric("1001", "1000", relative_tolerance=1e-3) == 1.0
    assert numeric("1002", "1000", relative_tolerance=1e-3) == 0.0
    assert numeric("-1000", "1000", relative_tolerance=1e-3) == 0.0
    assert numeric("0.01", "0", absolute_tolerance=0.01) == 1.0
    assert numeric("0.01", "0") == 0.0
    assert numeric("31989256", "31989256") == 1.0
    assert numeric("31989300", "31989256") == 0.0
    assert numeric("many", "1000") == 0.0


def test_a_task_without_a_number_is_at_fault() -> None:
    with pytest.raises(ValueError, match="'many' is not a number"):
        numeric("5", "many")
