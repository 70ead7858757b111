import numpy as np
import pytest

from harness.compare.statistics import (
    median_interval,
    percentile_95,
    ratio_interval,
    significance,
)


def test_interval_of_a_few_runs_is_their_range() -> None:
    interval = median_interval([3.0, 1.0, 2.0])
    assert interval is not None
    assert (interval.low, interval.high) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("runs", "coverage"),
    [
        (3, 0.75),  # the range of three holds the median unless all lie on one side of it: 1 - 2 / 2^3
        (15, 0.93),  # percentile intervals of few values are known to be somewhat short of their level
    ],
)
def test_interval_holds_the_true_median_as_often_as_the_report_says(runs: int, coverage: float) -> None:
    generator = np.random.default_rng(7)
    held = 0
    for _ in range(1000):
        interval = median_interval(list(generator.normal(10, 1, runs)))
        assert interval is not None
        held += interval.low <= 10 <= interval.high
    # four standard errors of a thousand draws
    assert held / 1000 == pytest.approx(coverage, abs=4 * (coverage * (1 - coverage) / 1000) ** 0.5)


def test_two_runs_have_no_interval() -> None:
    assert median_interval([1.0, 2.0]) is None
    assert significance([1.0, 2.0], [5.0, 6.0, 7.0]) == "not judged"


def test_runs_that_overlap_do_not_differ_beyond_noise() -> None:
    assert significance([1.0, 2.0, 3.0], [2.5, 3.5, 4.5]) == "within noise"


def test_runs_that_are_apart_differ_beyond_noise() -> None:
    assert significance([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]) == "beyond noise"


def test_equal_runs_give_equal_intervals_every_time() -> None:
    assert ratio_interval([1.0, 2.0, 4.0], [3.0, 5.0, 6.0]) == ratio_interval(
        [1.0, 2.0, 4.0], [3.0, 5.0, 6.0]
    )


def test_ratio_to_zero_is_not_judged() -> None:
    assert ratio_interval([1.0, 2.0, 3.0], [0.0, 1.0, 2.0]) is None


def test_percentile_is_interpolated() -> None:
    assert percentile_95([0.0, 100.0]) == pytest.approx(95.0)
    assert percentile_95([]) is None
