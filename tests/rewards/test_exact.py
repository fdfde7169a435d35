"""Text equality: what counts as the same, and what must not."""

import pytest

from midflight.rewards import exact
from midflight.rewards.exact import normalise


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Lima", "lima"),
        ("  The  Lima. ", "Lima"),
        ("N'Djamena", "NDjamena"),
        ("N\u2019Djamena", "N'Djamena"),
        ("\uff2cima", "Lima"),
        ("Washington, D.C.", "Washington DC"),
        ("Stra\u00dfe", "STRASSE"),
        ("1,000", "1000"),
        ("+", "+"),
        ("A", "a"),
    ],
)
def test_equal(answer: str, expected: str) -> None:
    assert exact(answer, expected) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Lima, Peru", "Lima"),
        ("", "Lima"),
        ("...", "Lima"),
        ("-5", "5"),
        ("3.5", "35"),
        (".5", "5"),
        ("the", "an"),
        ("+", "-"),
        ("theatre", "atre"),
    ],
)
def test_different(answer: str, expected: str) -> None:
    assert exact(answer, expected) == 0.0


def test_aliases() -> None:
    assert exact("USA", "United States", aliases=["U.S.A."]) == 1.0
    assert exact("UK", "United States", aliases=["U.S.A."]) == 0.0


def test_normalise() -> None:
    assert normalise("An apple, the 'Porto-Novo' of A.") == "apple portonovo of"
    assert normalise("It is -3.50.") == "it is -3.50"
