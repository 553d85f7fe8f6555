"""p-values against scipy, power and coverage by simulation, and what would decide."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from compress.evaluation.intervals import Array
from compress.evaluation.significance import (
    holm,
    mcnemar,
    more_needed,
    smallest_difference,
    smallest_difference_unpaired,
)


def drawn(n: int, lost: float, gained: float, seed: int) -> Array:
    """Differences −1, 0, 1 of n documents."""
    uniform_N = np.random.default_rng(seed).random(n)
    return np.where(uniform_N < lost, -1.0, np.where(uniform_N < lost + gained, 1.0, 0.0))


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (5, 5), (15, 4), (4, 15), (0, 9), (93, 64), (700, 600)])
def test_mcnemar_is_the_binomial_test(lost: int, gained: int) -> None:
    wanted = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(wanted, rel=1e-9)


def test_holm_by_hand() -> None:
    """0.01 × 4, 0.02 × 3, 0.03 × 2, 0.5 × 1, each at least the one before, in the order in which they came."""
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.4, 0.3]) == pytest.approx([0.6, 0.6])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


@pytest.mark.parametrize(("n", "share"), [(200, 0.10), (1400, 0.11)])
def test_the_smallest_difference_is_seen_four_times_in_five(n: int, share: float) -> None:
    """Of samples with just that difference, the share whose interval, with a document more on either side, leaves zero
    out (by the normal formula)."""
    size = smallest_difference(n, round(share * n))
    lost, gained = (share + size) / 2, (share - size) / 2
    seen = 0
    for seed in range(2000):
        difference_N = np.append(drawn(n, lost, gained, seed), (1.0, -1.0))
        seen += abs(difference_N.mean()) > 1.96 * difference_N.std() / math.sqrt(n + 2)
    assert seen / 2000 == pytest.approx(0.8, abs=0.04)


def test_pairs_see_far_less_than_two_samples() -> None:
    paired, unpaired = smallest_difference(1400, 157), smallest_difference_unpaired(1400, (0.40, 0.38))
    assert paired == pytest.approx(0.025, abs=0.001)
    assert unpaired == pytest.approx(0.052, abs=0.001)
    assert smallest_difference(200, 0) > 0.019  # no change in 200 documents does not see everything


def test_how_many_more_would_decide() -> None:
    """−0.5 ± 2 points around a margin of −1: the half-width has to become 0.5, so 16 times the documents."""
    assert more_needed(100, -0.005, (-0.025, 0.015), -0.01) == pytest.approx(1500, abs=1)
    assert more_needed(100, -0.015, (-0.035, 0.005), -0.01) == pytest.approx(
        1500, abs=1
    )  # on the other side, up to the margin
    assert more_needed(100, -0.01, (-0.03, 0.01), -0.01) is None
    assert more_needed(100, 0.0, (-0.009, 0.009), -0.01) == 0
