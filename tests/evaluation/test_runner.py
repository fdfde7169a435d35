import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from midflight.agent.types import Answer, Query, StopReason, Trajectory
from midflight.evaluation import Scored, evaluate
from midflight.seeds import derive
from midflight.tasks.base import Task
from tests.evaluation.build import task, trajectory


class Later:
    """Answers with the query's id; earlier questions take longer, and it counts how many run at once."""

    def __init__(self, down: Sequence[str] = (), silent: Sequence[str] = ()) -> None:
        self.down, self.silent = down, silent
        self.running = self.most = 0
        self.seeds: dict[str, list[int | None]] = {}

    async def run(self, query: Query) -> Trajectory:
        self.seeds.setdefault(query.id, []).append(query.seed)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001 * (9 - int(query.id)))
        self.running -= 1
        if query.id in self.down:
            return trajectory(answer="right by luck", stop=StopReason.INFRASTRUCTURE)
        return replace(trajectory(), query=query, answer=None if query.id in self.silent else Answer(query.id))


def score(asked: Task, answer: str | None) -> float:
    return float(answer == asked.answer)


TASKS = [task(str(number), answer=str(number) if number % 2 else "?") for number in range(8)]


def test_results_are_in_task_order_and_at_most_concurrency_run() -> None:
    flow, finished = Later(), list[Scored]()
    found = asyncio.run(evaluate(flow, TASKS, concurrency=3, seed=1, score=score, on_done=finished.append))
    assert [item.task.id for item in found] == [str(number) for number in range(8)]
    assert [item.trajectory.query.id for item in found] == [str(number) for number in range(8)]
    assert [item.reward for item in found] == [0.0, 1.0] * 4
    assert flow.most == 3
    assert len(finished) == 8 and finished != found


def test_trials_are_seeded_apart_and_stably() -> None:
    flow = Later()
    found = asyncio.run(evaluate(flow, TASKS[:2], trials=3, concurrency=1, seed=5, score=score))
    assert [item.task.id for item in found] == ["0", "0", "0", "1", "1", "1"]
    assert flow.seeds["1"] == [derive(5, "1", trial) for trial in range(3)]
    assert len({*flow.seeds["0"], *flow.seeds["1"]}) == 6
    alone = Later()
    asyncio.run(evaluate(alone, TASKS[1:2], trials=3, concurrency=8, seed=5, score=score))
    assert alone.seeds["1"] == flow.seeds["1"]


def test_no_answer_is_scored_and_an_infrastructure_failure_is_not() -> None:
    asked: list[str | None] = []

    def record(of: Task, answer: str | None) -> float:
        asked.append(answer)
        return 1.0

    flow = Later(down=["0"], silent=["1"])
    found = asyncio.run(evaluate(flow, TASKS[:3], concurrency=1, score=record))
    assert [item.reward for item in found] == [0.0, 1.0, 1.0]
    assert asked == [None, "2"]


def test_repeated_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="'1' is used more than once"):
        asyncio.run(evaluate(Later(), [*TASKS, TASKS[1]], score=score))


def test_a_fault_of_the_scorer_is_raised_as_it_is() -> None:
    def broken(of: Task, answer: str | None) -> float:
        raise KeyError("no such checker")

    with pytest.raises(KeyError, match="no such checker"):
        asyncio.run(evaluate(Later(), TASKS, concurrency=2, score=broken))
