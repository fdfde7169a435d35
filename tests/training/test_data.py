from dataclasses import replace

from midflight.recipe.config import CurriculumConfig
from midflight.tasks.base import Task
from midflight.training.data import ListSource, TaskStream

TASK = Task("t", "Q?", "A")


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
