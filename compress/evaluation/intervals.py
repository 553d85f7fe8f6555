"""95% intervals: of a share (Wilson), and of anything computed from documents (bootstrap).

A bootstrap draws the documents again, as many as there are and each as often as chance has it, and computes the
figure anew; the interval holds the middle 95% of 2,000 such figures (Efron 1979, percentile method). Documents are
drawn whole, with both models' answers, so what the models have in common cancels: the comparison is paired.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_Z = 1.959963984540054
_DRAWS = 2000


def wilson(share: float, n: int) -> tuple[float, float]:
    """The interval of a share seen in n cases (Wilson 1927): never outside 0 to 1, useful at 0 and 1 too."""
    assert n > 0
    centre = share + _Z**2 / (2 * n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n * n))
    scale = 1 + _Z**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap(statistic: Callable[[Array], float], values_NK: Array, seed: int = 0) -> tuple[float, float]:
    """The interval of `statistic` of N rows; `nan` where the figure is not a number in more than 2.5% of the draws."""
    generator = np.random.default_rng(seed)
    n = len(values_NK)
    drawn = np.array([statistic(values_NK[generator.integers(0, n, n)]) for _ in range(_DRAWS)])
    low, high = np.quantile(drawn, [0.025, 0.975], method="closest_observation")
    return float(low), float(high)


def mean_interval(values_N: Array, seed: int = 0) -> tuple[float, float]:
    """The interval of the mean of N values."""
    return bootstrap(lambda drawn_N: float(drawn_N.mean()), np.asarray(values_N, dtype=np.float64), seed)
