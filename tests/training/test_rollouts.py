"""Groups of trajectories: which endings are scored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from midflight.agent.types import StopReason
from midflight.engines.base import BudgetSpent, EngineError, GenerateRequest
from midflight.tasks.base import Task
from midflight.training.rollouts import collect
from tests.agent.doubles import compact_flow


def test_what_is_not_the_agents_doing_is_never_scored() -> None:
    said: Iterator[str | Exception] = iter(["finish", BudgetSpent("spent"), EngineError("down"), "no action"])
    asked: list[str | None] = []

    def score(task: Task, answer: str | None) -> float:
        asked.append(answer)
        return 0.5

    async def planned(cancel: asyncio.Event | None = None) -> list[tuple[StopReason, float | None]]:
        def script(request: GenerateRequest) -> str | Exception:
            return next(said)

        flow, _ = compact_flow(script, retries=0, max_turns=1)
        (group,) = await collect(flow, [Task("q", "?", "a")], 1 if cancel else 4, score, 0, cancel=cancel)
        assert [one for one, _ in group.scored] == [
            one for one, reward in zip(group.trajectories, group.rewards, strict=True) if reward is not None
        ]
        return [(one.stop_reason, reward) for one, reward in zip(group.trajectories, group.rewards, strict=True)]

    assert asyncio.run(planned()) == [
        (StopReason.FINISHED, 0.5),
        (StopReason.BUDGET, None),
        (StopReason.INFRASTRUCTURE, None),
        (StopReason.MAX_TURNS, 0.5),
    ]
    assert asked == ["", ""]
    cancelled = asyncio.Event()
    cancelled.set()
    assert asyncio.run(planned(cancelled)) == [(StopReason.CANCELLED, None)]
    assert len(asked) == 2


def test_the_endings_that_are_lost() -> None:
    lost = {StopReason.CANCELLED, StopReason.INFRASTRUCTURE, StopReason.BUDGET}
    assert {reason for reason in StopReason if reason.lost} == lost
