"""The sandbox benchmark: its object, from a short run on the real sandbox."""

import json

import pytest
import sandbox_speed

from tests.sandbox.ready import need_bubblewrap


def test_a_short_run_prints_the_five_figures(capsys):
    need_bubblewrap()
    assert sandbox_speed.main(["--rounds", "1", "--calls", "2", "--cold", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["bare_ms", "warm_ms", "cold_ms", "warm_numpy_ms", "calls_per_second"]
    assert all(value > 0 for value in figures.values()) and figures["cold_ms"] > figures["warm_ms"]


def test_without_a_sandbox_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sandbox_speed, "bubblewrap_problem", lambda: "apt-get install bubblewrap")
    assert sandbox_speed.main([]) == 2
    assert capsys.readouterr().err == "sandbox_speed: apt-get install bubblewrap\n"
    with pytest.raises(SystemExit):
        sandbox_speed.main(["--calls", "0"])
