"""The chaos benchmark: what it says of trajectories and rewards, and that it would say so if something were wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midflight.agent.flow import AgentFlow
from midflight.agent.types import Query, StopReason, Trajectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytestmark = pytest.mark.model  # the engine with token ids brings torch


def test_a_fifth_of_the_requests_breaks_and_no_reward_is_unearned(capsys: pytest.CaptureFixture[str]) -> None:
    import chaos

    sys.argv = ["chaos.py", "--json", "--trajectories", "150", "--seed", "3"]
    chaos.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["trajectories"], found["lost"], found["unearned_rewards"]) == (150, 0, 0) and found["lost_to"] == {}
    assert sum(found["stop_reasons"].values()) == 150 and found["stop_reasons"]["finished"] > 120
    assert found["adds_up"] is True and found["key_shown"] is False
    faults = ["429", "500", "reset", "stall", "drip", "truncated", "wrong schema", "wrong token count", "stale weights"]
    assert set(found["broken_requests"]) == {f"{engine}: {fault}" for engine in ("text", "tokens") for fault in faults}
    share = sum(found["broken_requests"].values()) / (sum(found["broken_requests"].values()) + found["good_requests"])
    assert 0.1 < share < 0.3


def test_a_server_that_only_breaks_earns_nothing() -> None:
    import chaos

    found = chaos.measure(10, 1.0, 0)
    assert found["stop_reasons"] == {"infrastructure": 10} and found["unearned_rewards"] == 0 and found["adds_up"]
    assert found["key_taken_out"] > 0 and found["key_shown"] is False


def test_a_key_that_is_not_taken_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import chaos

    monkeypatch.setattr(chaos, "KEY", "lm-studio")  # a placeholder is no secret: it stays
    found = chaos.measure(10, 1.0, 0)
    assert found["key_shown"] is True and found["key_taken_out"] == 0


def test_a_trajectory_that_is_lost_is_counted_and_takes_none_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import chaos

    run, asked = AgentFlow.run, []

    async def gone(flow: AgentFlow, query: Query, **given: Any) -> Trajectory:
        asked.append(query)
        if len(asked) == 3:
            raise RuntimeError("gone")
        return await run(flow, query, **given)

    monkeypatch.setattr(AgentFlow, "run", gone)
    found = chaos.measure(10, 0.0, 0)
    assert (found["lost"], found["stop_reasons"], found["adds_up"]) == (1, {"finished": 9}, False)
    ((why, count),) = found["lost_to"].items()
    assert "RuntimeError('gone')" in why and count == 1 and found["unearned_rewards"] == 0


def test_an_unearned_reward_is_counted() -> None:
    import chaos

    from midflight.tasks.base import Task
    from midflight.training.rollouts import Group

    fine = Trajectory(Query("q"), (), StopReason.FINISHED, None)
    lost = replace(fine, stop_reason=StopReason.INFRASTRUCTURE)
    group = Group(Task("2", "q", "4"), (fine, fine, lost, lost), (1.0, 0.0, 0.0, None))
    assert chaos.judged(5, [group]) == {
        "lost": 1,
        "lost_to": {},
        "stop_reasons": {"finished": 2, "infrastructure": 2},
        "unearned": 2,
        "failed": 2,
        "unscored": 1,
    }
