import pytest

from midflight.recipe.config import TrainingConfig
from midflight.training.step import learning_rate


def rates(**settings: float) -> list[float]:
    training = TrainingConfig(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(training, step) for step in range(1, training.steps + 1)]


def test_constant_without_warm_up_and_decay() -> None:
    assert rates(steps=3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_linearly_to_the_step_after_it() -> None:
    assert rates(steps=5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_decay_reaches_its_share_at_the_last_step() -> None:
    assert rates(steps=5, final_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(steps=6, warmup_steps=1, final_rate=0.0) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(steps=1, final_rate=0.2) == [1.0]
    assert rates(steps=2, warmup_steps=1, final_rate=0.2) == [0.5, 1.0]
