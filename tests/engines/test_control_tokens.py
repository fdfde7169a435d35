"""Control tokens are taken apart whichever sign they begin with, and nothing else is touched."""

from __future__ import annotations

import pytest

from midflight.engines.plain import defused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <eos> b", "a < eos> b"),
        ("a [e~[ b", "a [ e~[ b"),
        ("a ]~b] b", "a ] ~b] b"),
        ("a > b | c ~b", "a > b | c ~b"),
    ],
)
def test_one_sign_is_enough_to_look(text: str, expected: str) -> None:
    assert defused(text) == expected == defused(expected)
