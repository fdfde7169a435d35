import numpy as np
import pytest

from midflight.evaluation import bootstrap_mean


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    values = [1.0] * 30 + [0.0] * 17 + [0.5] * 6
    assert bootstrap_mean(values, seed=4) == bootstrap_mean(values, seed=4)
    assert bootstrap_mean(values, seed=4, resamples=200) != bootstrap_mean(values, seed=5, resamples=200)


def test_it_is_the_percentile_bootstrap_of_numpy_draws() -> None:
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.25])
    drawn = np.random.default_rng(9).integers(0, 6, size=(500, 6))
    expected = np.quantile(values[drawn].mean(axis=1), [0.05, 0.95])
    found = bootstrap_mean(values.tolist(), resamples=500, confidence=0.9, seed=9)
    assert found == pytest.approx(tuple(expected), abs=1e-15)


def test_the_interval_is_near_the_normal_one_for_many_questions() -> None:
    low, high = bootstrap_mean([1.0] * 1200 + [0.0] * 800, seed=1)
    half = 1.96 * (0.6 * 0.4 / 2000) ** 0.5
    assert low == pytest.approx(0.6 - half, abs=0.003)
    assert high == pytest.approx(0.6 + half, abs=0.003)


def test_trials_of_one_question_are_drawn_together() -> None:
    once = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    four_times = [value for value in once for _ in range(4)]
    names = [str(question) for question in range(8) for _ in range(4)]
    assert bootstrap_mean(four_times, clusters=names, seed=2) == bootstrap_mean(once, seed=2)
    low, high = bootstrap_mean(four_times, seed=2)
    wide_low, wide_high = bootstrap_mean(four_times, clusters=names, seed=2)
    assert high - low < 0.7 * (wide_high - wide_low)


def test_values_without_variation_and_wrong_input() -> None:
    assert bootstrap_mean([1.0, 1.0, 1.0]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="empty"):
        bootstrap_mean([])
    with pytest.raises(ValueError, match="1 names for 2 values"):
        bootstrap_mean([0.0, 1.0], clusters=["a"])
