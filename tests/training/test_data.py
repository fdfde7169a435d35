from dataclasses import replace

from midflight.recipe.config import CurriculumConfig
from midflight.tasks.base import Task
from midflight.training.data import ListSource, TaskStream

TASK = Task("t", "Q?", "A")


def test_the_curriculum_draws_what_is_known_least_most():
    kinds = [replace(TASK, id=kind, kind=kind) for kind in ("known", "half", "never")]
    stream = TaskStream(ListSource(kinds, 0), 0, CurriculumConfig(floor=0.25, decay=0.5), 9)
    assert stream.weights() == {"known": 0.75, "half": 0.75, "never": 0.75}
    stream.update({"known": [1.0, 1.0], "half": [1.0, 0.0], "never": [0.0]})
    assert stream.weights() == {"known": 0.25, "half": 0.75, "never": 1.25}
    drawn = [task.kind for task in stream.draw(3, 0, 9)]
    assert sorted(drawn) == ["half"] * 3 + ["known"] + ["never"] * 5
    stream.update({"half": [1.0]})
    assert stream.success["half"] == 0.75


def test_the_same_step_draws_the_same_questions_and_another_step_others():
    tasks = [replace(TASK, id=str(i)) for i in range(50)]
    one, two = (TaskStream(ListSource(tasks, 5), 5, None, 16) for _ in range(2))
    assert one.draw(2, 0, 8) == two.draw(2, 0, 8)
    assert one.draw(2, 0, 8) != one.draw(3, 0, 8)
    assert one.draw(2, 0, 8) != one.draw(2, 8, 8)


def ids(stream, *steps, count=4, start=0):
    return [task.id for step in steps for task in stream.draw(step, start, count)]


def test_a_list_comes_in_passes_of_a_shuffled_order():
    stream = TaskStream(ListSource([replace(TASK, id=str(i)) for i in range(32)], 7), 0, None, 4)
    first, second = ids(stream, *range(1, 9)), ids(stream, *range(9, 17))
    assert sorted(first) == sorted(second) == sorted(map(str, range(32)))
    assert sorted(map(int, first[:4])) != [0, 1, 2, 3]
    assert ids(stream, 3) == first[8:12]  # also out of order, as after a resume
    other = TaskStream(ListSource([replace(TASK, id=str(i)) for i in range(32)], 8), 0, None, 4)
    assert sorted(ids(other, 1)) != sorted(first[:4])


def test_each_kind_of_a_list_comes_in_passes():
    tasks = [replace(TASK, id=f"{kind}{i}", kind=kind) for kind in "ab" for i in range(12)]
    stream = TaskStream(ListSource(tasks, 7), 0, None, 8)
    for first in (1, 4, 7):
        assert sorted(ids(stream, *range(first, first + 3), count=8)) == sorted(task.id for task in tasks)


def test_a_refill_draws_other_questions_and_no_step_repeats_one():
    stream = TaskStream(ListSource([replace(TASK, id=str(i)) for i in range(20)], 7), 0, None, 10)
    for step in (1, 2, 3):
        drawn = ids(stream, step) + ids(stream, step, start=4) + ids(stream, step, start=8, count=2)
        assert len(set(drawn)) == 10
    short = TaskStream(ListSource([replace(TASK, id=str(i)) for i in range(3)], 7), 0, None, 6)
    assert sorted(ids(short, 1, count=6)) == ["0", "0", "1", "1", "2", "2"]


def test_under_a_curriculum_one_draw_has_no_question_twice():
    tasks = [replace(TASK, id=f"{kind}{i}", kind=kind) for kind in "ab" for i in range(8)]
    stream = TaskStream(ListSource(tasks, 7), 0, CurriculumConfig(floor=0.1), 8)
    stream.update({"a": [0.0], "b": [1.0]})
    for step in range(1, 30):
        kind_a = [one for one in ids(stream, step, count=8) if one[0] == "a"]
        assert len(kind_a) == len(set(kind_a)) >= 7
        stream.update({"a": [0.0], "b": [1.0]})
