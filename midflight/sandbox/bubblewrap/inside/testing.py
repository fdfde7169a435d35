"""Runs pytest in this process and records what it says of each test."""

from __future__ import annotations

from typing import Any

_MOST = 1000
_MESSAGE = 2000
"""Characters of a message; the end is kept, where the error is."""


def run(paths: list[str]) -> tuple[int, list[dict[str, str]]]:
    """pytest's exit code and a row for each test; a file that cannot be collected is a row as well."""
    import pytest

    recorder = Recorder()
    options = ["-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", "--rootdir=/workspace", "--"]
    code = pytest.main([*options, *paths], plugins=[recorder])
    return int(code), list(recorder.rows.values())[:_MOST]


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
