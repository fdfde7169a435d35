"""`score`: the checker a task names, and nothing else."""

import pytest

from midflight.rewards import checker_fault, score
from midflight.tasks import Task


def test_score() -> None:
    lima = Task("1", "Capital of Peru?", "Lima")
    assert score(lima, "the Lima") == 1.0
    assert score(lima, "Quito") == 0.0
    assert score(lima, None) == 0.0
    assert score(lima, " ") == 0.0
    number = Task("2", "How many?", "1000", "numeric", {"relative_tolerance": 0.1})
    assert score(number, "1,050") == 1.0
    assert score(number, "1,150") == 0.0


def test_unknown_checker_or_option() -> None:
    with pytest.raises(ValueError, match="task 'x': unknown checker 'fuzzy'; valid: exact, numeric"):
        score(Task("x", "?", "a", "fuzzy"), "a")
    with pytest.raises(ValueError, match="no option 'tolerance'; valid: relative_tolerance, absolute_tolerance"):
        score(Task("x", "?", "1", "numeric", {"tolerance": 1}), None)
    assert checker_fault("exact", {"aliases": []}) is None
