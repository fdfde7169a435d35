"""How sure a mean, or the difference of two, is: percentile bootstrap over questions; score intervals of proportions.

Invariant: same values, same seed, same two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_BLOCK = 1 << 20  # draws held in memory at once


def bootstrap_mean(
    values: Sequence[float],
    *,
    clusters: Sequence[str] | None = None,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values` (Efron, 1979).

    Several trials of one question are not independent: with `clusters` (one name a value) whole clusters are drawn,
    and the mean of a resample is over all its values. A sample without variation gives an interval of no width: where
    every question is right, the interval says nothing about the questions not asked.

    Args:
        values: rewards, one a trial.
        clusters: the question of each value; None takes each value as its own.
        resamples: how many means are drawn.
        confidence: share of those means between low and high.
        seed: of the numpy generator.

    Returns:
        low, high.

    Raises:
        ValueError: no values, or as many cluster names as values are not given.
    """
    if not values:
        raise ValueError("values is empty: a mean needs at least one")
    names = [str(place) for place in range(len(values))] if clusters is None else list(clusters)
    if len(names) != len(values):
        raise ValueError(f"clusters has {len(names)} names for {len(values)} values; give one a value")
    place_of = {name: place for place, name in enumerate(dict.fromkeys(names))}
    cluster_of_value = np.array([place_of[name] for name in names])
    sums_K = np.bincount(cluster_of_value, weights=np.asarray(values, dtype=np.float64))
    sizes_K = np.bincount(cluster_of_value).astype(np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, _BLOCK // len(sums_K))
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        drawn = generator.integers(0, len(sums_K), size=(stop - start, len(sums_K)))
        means[start:stop] = sums_K[drawn].sum(axis=1) / sizes_K[drawn].sum(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)


def wilson(mean: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson, 1927, Journal of the American Statistical Association 22: 209-212).

    Of the mean of values anywhere in [0, 1] it is a conservative interval: their variance is at most
    `mean * (1 - mean)`, which is a proportion's. Unlike the bootstrap's it has a width where all values are the same.

    Args:
        mean: in [0, 1].
        n: values, at least 1.
        confidence: of the two-sided interval.

    Returns:
        low, high, with `mean` between them.
    """
    if n < 1 or not 0.0 <= mean <= 1.0:
        raise ValueError(f"mean={mean}, n={n}: a proportion is in [0, 1] and needs at least one value")
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    centre = mean + z * z / (2 * n)
    half = z * math.sqrt(mean * (1.0 - mean) / n + z * z / (4 * n * n))
    scale = 1.0 + z * z / n
    low, high = (centre - half) / scale, (centre + half) / scale
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))  # at 0 and 1 the bound is the mean, without rounding


def difference(later: tuple[float, float, float], earlier: tuple[float, float, float]) -> tuple[float, float]:
    """Interval of the difference of two independent means, each given as mean, low, high of one confidence.

    Of Wilson intervals it is Newcombe's hybrid score interval (1998, Statistics in Medicine 17: 873-890, method 10);
    that the same formula joins intervals of other kinds is Zou and Donner's (2008, Statistics in Medicine 27:
    1693-1702). A number that is known is an interval without width.

    Returns:
        low, high of `later - earlier`.
    """
    (mean, low, high), (mean_0, low_0, high_0) = later, earlier
    change = mean - mean_0
    return change - math.hypot(mean - low, high_0 - mean_0), change + math.hypot(high - mean, mean_0 - low_0)
