"""Intervals: textbook values, the normal theory where it holds, coverage, and the seed."""

import numpy as np
import pytest

from compress.evaluation.intervals import bootstrap, mean_interval, wilson


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.5, 100, 0.4038, 0.5962), (0.0, 20, 0.0, 0.1611), (1.0, 20, 0.8389, 1.0)],
)
def test_wilson(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_is_symmetric_and_holds_its_share() -> None:
    for k in range(31):
        low, high = wilson(k / 30, 30)
        assert low <= k / 30 <= high
        assert wilson(1 - k / 30, 30) == pytest.approx((1 - high, 1 - low))


def test_mean_interval_is_the_normal_one_for_many_values() -> None:
    values_N = np.random.default_rng(1).normal(3, 2, 400)
    low, high = mean_interval(values_N)
    error = values_N.std(ddof=1) / 20
    assert low == pytest.approx(values_N.mean() - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(values_N.mean() + 1.96 * error, abs=0.25 * error)


def test_mean_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for seed in range(120):
        values_N = (generator.random(80) < 0.3).astype(float)
        low, high = mean_interval(values_N, seed)
        covered += low <= 0.3 <= high
    assert 106 <= covered <= 120  # 95% of 120 is 114; the binomial's own spread is 2.4


def test_the_same_seed_gives_the_same_interval_and_global_seeds_do_not_matter() -> None:
    values_N = np.arange(20.0)
    first = mean_interval(values_N)
    np.random.seed(5)
    assert mean_interval(values_N) == first
    assert mean_interval(values_N, seed=1) != first


def test_equal_values_have_no_width() -> None:
    assert mean_interval(np.full(7, 0.25)) == (0.25, 0.25)


def test_bootstrap_draws_whole_rows() -> None:
    values_N2 = np.stack([np.arange(50.0), 2 * np.arange(50.0)], axis=1)
    low, high = bootstrap(lambda drawn: float(drawn[:, 1].mean() / drawn[:, 0].mean()), values_N2)
    assert (low, high) == pytest.approx((2, 2))


def test_what_is_no_number_in_many_draws_has_no_interval() -> None:
    low, high = bootstrap(lambda drawn: float("nan"), np.zeros((4, 1)))
    assert np.isnan([low, high]).all()
