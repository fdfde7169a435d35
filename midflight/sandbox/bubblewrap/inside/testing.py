"""Runs pytest in this process and records what it says of each test."""

from __future__ import annotations

from collections import Counter
from typing import Any

_MOST = 1000
_MESSAGE = 2000
"""Characters of a message; the end is kept, where the error is."""
CHARACTERS = 2**18
"""Of all names and messages: twelve bytes each, at worst, of a reply."""


def run(paths: list[str]) -> tuple[int, dict[str, Any]]:
    """pytest's exit code, how many tests had which outcome, and rows; a file that cannot be collected is one as well.

    Where there are too many rows, those of tests that did not pass come before the others.
    """
    import pytest

    recorder = Recorder()
    options = ["-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", "--rootdir=/workspace"]
    options.append("--no-summary")  # it repeats each message, and many are more than a program may write
    code = pytest.main([*options, "--", *paths], plugins=[recorder])
    rows = list(recorder.rows.values())
    return int(code), {"tests": first_to_tell(rows), "counts": Counter(row["outcome"] for row in rows)}


def first_to_tell(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """As many rows as a reply has room for, in the order they came."""
    told: set[int] = set()
    room = CHARACTERS
    for index in sorted(range(len(rows)), key=lambda index: rows[index]["outcome"] == "passed"):
        room -= sum(map(len, rows[index].values()))
        if room < 0 or len(told) == _MOST:
            break
        told.add(index)
    return [row for index, row in enumerate(rows) if index in told]


class Recorder:
    """A pytest plugin: the worst that was said of each test."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            outcome = report.outcome if report.when == "call" or report.skipped else "error"
            self._add(report.nodeid, outcome, report)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._add(report.nodeid, "error" if report.failed else "skipped", report)

    def _add(self, name: str, outcome: str, report: Any) -> None:
        text = ""
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = str(report.longrepr[-1])
        elif outcome != "passed":
            text = str(report.longrepr or "")
        self.rows[name] = {"name": name, "outcome": outcome, "message": text[-_MESSAGE:]}
