"""How sure a mean is: percentile bootstrap, over questions.

Invariant: same values, same seed, same two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

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
