import numpy as np
import pytest

from midflight.evaluation import bootstrap_mean, difference, wilson


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


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_of_newcombes_single_proportions(successes: int, n: int, low: float, high: float) -> None:
    """Newcombe, 1998, Statistics in Medicine 17: 857-872, table I, method 3."""
    assert wilson(successes / n, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_has_a_width_at_the_ends_and_ends_there_exactly() -> None:
    for n in (1, 3, 16, 1000):
        low, high = wilson(1.0, n)
        assert high == 1.0 and 0.0 < low < 1.0
        assert wilson(0.0, n) == pytest.approx((0.0, 1.0 - low)) and wilson(0.0, n)[0] == 0.0
    assert wilson(0.5, 4, confidence=0.975) == pytest.approx((0.126927, 0.873073), abs=1e-6)
    for mean, n in ((0.5, 0), (1.1, 3), (-0.1, 3), (float("nan"), 3)):
        with pytest.raises(ValueError, match="a proportion is in"):
            wilson(mean, n)


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
    ],
)
def test_differences_of_newcombes_proportions(
    one: tuple[int, int], other: tuple[int, int], low: float, high: float
) -> None:
    """Newcombe, 1998, Statistics in Medicine 17: 873-890, table II, method 10."""
    first, second = ((successes / n, *wilson(successes / n, n)) for successes, n in (one, other))
    assert difference(first, second) == pytest.approx((low, high), abs=5e-5)
    assert difference(second, first) == pytest.approx((-high, -low), abs=5e-5)


def test_the_difference_from_a_known_number_has_the_width_of_the_other_mean() -> None:
    low, high = wilson(0.25, 16)
    assert difference((1.0, 1.0, 1.0), (0.25, low, high)) == pytest.approx((1.0 - high, 1.0 - low))
    assert difference((1.0, 1.0, 1.0), (1.0, *wilson(1.0, 16)))[0] == 0.0


def test_the_interval_of_a_difference_covers_it_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for p, q in ((0.5, 0.5), (0.9, 0.4), (0.05, 0.3)):
        covered = 0
        for ones, others in zip(generator.binomial(16, p, 2000), generator.binomial(16, q, 2000), strict=True):
            first, second = ((k / 16, *wilson(k / 16, 16)) for k in (int(ones), int(others)))
            low, high = difference(first, second)
            covered += low <= p - q <= high
        assert 0.93 < covered / 2000 < 0.99
