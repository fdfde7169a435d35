from dataclasses import replace

import pytest

from midflight.agent.types import Action, Answer, Generation, Query, StopReason, ToolResult, Trajectory, Turn, Verdict
from midflight.config import CurriculumConfig
from midflight.engines.base import FinishReason, Sampling
from midflight.tasks.base import Task
from midflight.training.data import ListSource, TaskStream
from midflight.training.rollouts import Group, advantages, rows_of

TASK = Task("t", "Q?", "A")


def trajectory(lengths, stop=StopReason.FINISHED):
    turns = []
    for index, length in enumerate(lengths, 1):
        drawn = Generation(
            text="x",
            finish_reason=FinishReason.STOP,
            prompt_ids=(1, 2),
            ids=tuple(range(length)),
            logprobs=(-1.0,) * length,
            forced=(False,) * (length - 1) + (True,),
            sampling=Sampling(temperature=0.7),
            grammar="g",
        )
        turns.append(Turn(index, drawn, Action("", "a", "b"), None, ToolResult("r"), Verdict(False)))
    return Trajectory(Query("Q?"), tuple(turns), stop, Answer("A"))


def test_rows_weigh_every_trajectory_and_every_turn_alike():
    group = Group(TASK, (trajectory([3]), trajectory([2, 5])), (1.0, 0.0))
    rows = rows_of([group, group], "flow_grpo")
    assert [row.advantage for row in rows] == [1.0, -1.0, -1.0] * 2
    # 1 / (2 groups * 2 trajectories * T_i * unforced tokens)
    assert [row.weight for row in rows] == [1 / 8, 1 / 8, 1 / 32] * 2
    assert sum(row.weight * (len(row.ids) - 1) for row in rows) == pytest.approx(1.0)
    assert rows[0].temperature == 0.7 and rows[0].grammar == "g"


def test_groups_without_signal_give_no_rows_and_do_not_count():
    live = Group(TASK, (trajectory([3]), trajectory([3])), (1.0, 0.0))
    dead = Group(TASK, (trajectory([3]), trajectory([3])), (1.0, 1.0))
    assert rows_of([dead], "flow_grpo") == []
    assert rows_of([live, dead], "flow_grpo") == rows_of([live], "flow_grpo")


def test_a_trajectory_ended_by_infrastructure_is_left_out_of_the_group():
    lost = trajectory([3], StopReason.INFRASTRUCTURE)
    group = Group(TASK, (trajectory([3]), lost, trajectory([3]), trajectory([3])), (1.0, None, 0.0, 0.0))
    assert advantages(group, "flow_grpo") == pytest.approx([1.4142136, -0.7071068, -0.7071068], abs=1e-6)
    rows = rows_of([group], "flow_grpo")
    assert [row.weight for row in rows] == [1 / (3 * 2)] * 3


def test_the_number_of_turns_does_not_change_an_advantage():
    rewards = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    short = Group(TASK, tuple(trajectory([2]) for _ in rewards), rewards)
    mixed = Group(TASK, tuple(trajectory([2] * turns) for turns in (1, 1, 3, 3, 3, 3, 3, 3)), rewards)
    assert advantages(short, "flow_grpo") == advantages(mixed, "flow_grpo")
    assert advantages(mixed, "turn_normalised")[0] == pytest.approx(2.92, abs=0.005)


def test_the_curriculum_draws_what_is_known_least_most():
    kinds = [replace(TASK, id=kind, kind=kind) for kind in ("known", "half", "never")]
    stream = TaskStream(ListSource(kinds), 0, CurriculumConfig(floor=0.25, decay=0.5))
    assert stream.weights() == {"known": 0.75, "half": 0.75, "never": 0.75}
    stream.update({"known": [1.0, 1.0], "half": [1.0, 0.0], "never": [0.0]})
    assert stream.weights() == {"known": 0.25, "half": 0.75, "never": 1.25}
    drawn = [task.kind for task in stream.draw(3, 0, 9)]
    assert sorted(drawn) == ["half"] * 3 + ["known"] + ["never"] * 5
    stream.update({"half": [1.0]})
    assert stream.success["half"] == 0.75


def test_the_same_step_draws_the_same_questions_and_another_step_others():
    tasks = [replace(TASK, id=str(i)) for i in range(50)]
    one, two = TaskStream(ListSource(tasks), 5, None), TaskStream(ListSource(tasks), 5, None)
    assert one.draw(2, 0, 8) == two.draw(2, 0, 8)
    assert one.draw(2, 0, 8) != one.draw(3, 0, 8)
    assert one.draw(2, 0, 8) != one.draw(2, 8, 8)
