"""Intervals: textbook values, the normal theory where it holds, coverage, and the seed."""

import numpy as np
import pytest

from compress.evaluation.intervals import bootstrap, mean_interval, paired_difference, student, wilson


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.5, 100, 0.4038, 0.5962), (0.0, 20, 0.0, 0.1611), (1.0, 20, 0.8389, 1.0)],
)
def test_wilson(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)
    assert wilson(0, n)[0] == 0
    assert wilson(1, n)[1] == 1


def test_wilson_is_symmetric_and_holds_its_share() -> None:
    for k in range(31):
        low, high = wilson(k / 30, 30)
        assert low <= k / 30 <= high
        assert wilson(1 - k / 30, 30) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("degrees", "wanted"), [(1, 12.706), (3, 3.182), (7, 2.365), (15, 2.131), (60, 2.000), (999, 1.962)]
)
def test_student(degrees: int, wanted: float) -> None:
    assert student(degrees) == pytest.approx(wanted, rel=0.005)


@pytest.mark.parametrize("n", [4, 16, 80])
def test_mean_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    generator = np.random.default_rng(n)
    draws = 2000
    covered = 0
    for _ in range(draws):
        low, high = mean_interval(generator.normal(0.3, 2.0, n))
        covered += low <= 0.3 <= high
    assert abs(covered / draws - 0.95) < 0.015  # three times the binomial's own spread


def test_one_value_has_no_interval() -> None:
    assert np.isnan(mean_interval(np.array([3.0]))).all()


@pytest.mark.parametrize(("gain", "loss"), [(0.0, 0.0), (0.0, 0.01), (0.05, 0.05), (0.02, 0.1)])
def test_paired_difference_covers_the_truth(gain: float, loss: float) -> None:
    """Also where hardly a document changes: two hundred that all stayed allow that one in seventy would not."""
    generator = np.random.default_rng(3)
    covered = 0
    for seed in range(60):
        drawn = generator.random(200)
        values_N = (drawn < gain).astype(float) - (drawn > 1 - loss).astype(float)
        low, high = paired_difference(values_N, seed)
        covered += low <= gain - loss <= high
        assert high - low > 0.01
    assert covered >= 52  # 95% of 60 is 57; the binomial's own spread is 1.7


def test_paired_difference_is_the_normal_one_for_many_changes() -> None:
    values_N = np.random.default_rng(1).integers(-1, 2, 400).astype(float)
    low, high = paired_difference(values_N)
    error = values_N.std(ddof=1) / 20
    assert low == pytest.approx(values_N.mean() - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(values_N.mean() + 1.96 * error, abs=0.25 * error)


def test_the_same_seed_gives_the_same_interval_and_global_seeds_do_not_matter() -> None:
    values_N1 = np.random.default_rng(2).normal(size=(50, 1))
    first = bootstrap(lambda mean_D1: mean_D1[:, 0], values_N1)
    np.random.seed(5)
    assert bootstrap(lambda mean_D1: mean_D1[:, 0], values_N1) == first
    assert bootstrap(lambda mean_D1: mean_D1[:, 0], values_N1, seed=1) != first


def test_bootstrap_draws_whole_rows() -> None:
    values_N2 = np.stack([np.arange(50.0), 2 * np.arange(50.0)], axis=1)
    low, high = bootstrap(lambda mean_D2: mean_D2[:, 1] / mean_D2[:, 0], values_N2)
    assert (low, high) == pytest.approx((2, 2))


def test_what_is_no_number_in_many_draws_has_no_interval() -> None:
    low, high = bootstrap(lambda mean_D1: mean_D1[:, 0] + np.nan, np.zeros((4, 1)))
    assert np.isnan([low, high]).all()


def test_bootstrap_is_that_of_rows_drawn_one_by_one() -> None:
    source = np.random.default_rng(4)
    values_N2 = source.integers(0, 2, (60, 2)).astype(float)
    drawn = [values_N2[source.integers(0, 60, 60)].mean(0) for _ in range(4000)]
    wanted = np.quantile([mean[0] - mean[1] for mean in drawn], [0.025, 0.975])
    found = bootstrap(lambda mean_D2: mean_D2[:, 0] - mean_D2[:, 1], values_N2)
    assert found == pytest.approx(wanted, abs=1.5 / 60)  # steps of 1/60; 2,000 draws' own noise
