from dataclasses import replace

import pytest

from midflight.agent.types import ErrorKind, StopReason
from midflight.training.measures import step_record
from midflight.training.rollouts import Group
from tests.evaluation.build import task, trajectory, turn


def test_a_steps_record_by_hand() -> None:
    easy, hard = task("a", "capital", 1), task("b", "sum", 3)
    right = trajectory(turn(1, "capital", "Peru", "Lima"), turn(2, "finish"))
    wrong = trajectory(turn(1, "capital", "Pru", "no such country", ErrorKind.TOOL_ERROR), turn(2, "finish"))
    lost = replace(trajectory(stop=StopReason.INFRASTRUCTURE, answer=None), error="down")
    long = trajectory(*(turn(index, "population", "Peru", "1") for index in range(1, 5)), stop=StopReason.MAX_TURNS)
    record = step_record(
        4,
        [
            Group(easy, (right, right), (1.0, 1.0)),
            Group(easy, (right, wrong, lost), (1.0, 0.0, None)),
            Group(hard, (long,), (0.0,)),
        ],
        [[[0.0, 0.0]] * 2, [[1.0] * 2, [-1.0] * 2], [[0.0] * 4]],
    )
    assert record["step"] == 4 and record["infrastructure_reasons"] == {"down": 1}
    assert record["reward"] == pytest.approx(3 / 5)
    assert record["reward_by_kind"] == {"capital": 0.75, "sum": 0.0}
    assert record["success_by_level"] == {"1": 0.75, "3": 0.0}
    assert (record["groups"], record["groups_with_signal"], record["groups_all_right"]) == (3, 1, 1)
    assert (record["trajectories"], record["infrastructure"], record["turns"]) == (6, 1, 2.0)
    assert record["tool_shares"] == pytest.approx({"capital": 4 / 12, "finish": 4 / 12, "population": 4 / 12})
    assert record["errors"]["tool_error"] == pytest.approx(1 / 12)
    assert record["tool_error_rate"] == pytest.approx(1 / 8)  # of the calls: finish is none
    assert record["stop_reasons"] == {"finished": 4, "infrastructure": 1, "max_turns": 1}


def test_a_step_that_lost_everything_has_a_record_too() -> None:
    lost = trajectory(stop=StopReason.INFRASTRUCTURE, answer=None)
    record = step_record(1, [Group(task("a"), (lost, lost), (None, None))], [[]])
    assert (record["reward"], record["turns"], record["infrastructure"]) == (None, 0.0, 2)
    assert (record["groups_with_signal"], record["groups_all_right"], record["reward_by_kind"]) == (0, 0, {})
