"""What the commands ask of the machine."""

from __future__ import annotations

import resource

import pytest

from midflight.cli.machine import allow_files


def test_a_command_may_hold_as_many_files_as_a_thousand_trajectories_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    for limits, expected in (
        ((1024, 524_288), [(10_000, 524_288)]),
        ((1024, 4096), [(4096, 4096)]),
        ((4096, 4096), []),
        ((20_000, 20_000), []),
        ((1024, resource.RLIM_INFINITY), [(10_000, resource.RLIM_INFINITY)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ):
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        allow_files(10_000)
        assert asked == expected
