from collections.abc import Sequence
from itertools import product
from math import comb
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.stats import permutation_test, wilcoxon

from harness.judge.statistics import (
    LEVEL,
    Interval,
    Significance,
    chance,
    median_interval,
    percentile_95,
    runs_to_judge,
    sign_flip_chances,
    stratified_significance,
    value_range,
    walsh,
)
from tests.representatives import first

Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def significance(values: Sequence[float], base: Sequence[float], comparisons: int = 1) -> Significance:
    """Of two sets of runs of one session."""
    return stratified_significance([(values, base)], comparisons)


def chances(values: ArrayLike, base: ArrayLike) -> Floats:
    """By scipy: the share of all divisions of the runs into two such sets that are at least so far apart.

    `values` and `base` have a row per comparison and a column per run.
    """

    def far(left: Floats, right: Floats, axis: int) -> Floats:
        return np.asarray(np.abs(left.mean(axis=axis) - right.mean(axis=axis)))

    sides = np.asarray(values, float), np.asarray(base, float)
    test = permutation_test(sides, far, vectorized=True, axis=1, n_resamples=20_000, alternative="greater")
    return np.asarray(test.pvalue)


def test_fewer_than_six_runs_have_a_range_and_no_interval() -> None:
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) is None
    assert value_range([3.0, 1.0, 2.0]) == Interval(1.0, 3.0)
    assert value_range([]) is None


def test_interval_of_the_median_is_that_of_published_tables() -> None:
    """Conover, Practical Nonparametric Statistics: of 10 values the 2nd and 9th, of 20 the 6th and 15th."""
    assert median_interval(range(1, 7)) == Interval(1, 6)
    assert median_interval(range(1, 11)) == Interval(2, 9)
    assert median_interval(range(1, 21)) == Interval(6, 15)


@pytest.mark.parametrize("runs", first([6], [6, 9, 15]))
@pytest.mark.costly
def test_interval_holds_the_true_median_as_often_as_it_says(runs: int) -> None:
    drawn = np.random.default_rng(7).lognormal(0, 1, (2000, runs))
    intervals = [median_interval(list(values)) for values in drawn]
    held = sum(interval is not None and interval.low <= 1 <= interval.high for interval in intervals)
    assert held / 2000 >= 0.95 - 3 * (0.95 * 0.05 / 2000) ** 0.5


@pytest.mark.parametrize(("cells", "runs"), [(2, 4), (2, 6), (3, 5), (5, 6), (5, 7)])
@pytest.mark.costly
def test_equal_cells_raise_a_false_alarm_in_at_most_one_of_twenty_comparisons(cells: int, runs: int) -> None:
    """The fastest is chosen after the fact, as the report does, and all others stand beside it."""
    generator = np.random.default_rng(11)
    tries = 1000
    drawn = generator.lognormal(0, 0.1, (tries, cells, runs))
    drawn = np.take_along_axis(drawn, np.argsort(np.median(drawn, axis=2))[:, :, np.newaxis], axis=1)
    others, fastest = drawn[:, :-1], np.repeat(drawn[:, -1:], cells - 1, axis=1)
    found = chances(others.reshape(-1, runs), fastest.reshape(-1, runs)).reshape(tries, cells - 1)
    least = (1 - LEVEL) / comb(cells, 2)
    alone = np.argwhere((found > least) & (found <= 1 - LEVEL))[:1]
    """Beyond noise if these were the only two cells."""
    for place, other in [(0, 0), *alone.tolist()]:
        judged = significance(others[place, other].tolist(), fastest[place, other].tolist(), comb(cells, 2))
        assert judged == ("beyond noise" if found[place, other] <= least else "within noise")
    alarms = np.count_nonzero(found.min(axis=1) <= least)
    assert alarms / tries <= 0.05 + 3 * (0.05 * 0.95 / tries) ** 0.5


@pytest.mark.parametrize(("cells", "runs"), [(2, 4), (3, 5), (5, 6), (19, 8)])
def test_runs_that_are_apart_differ_once_there_are_enough(cells: int, runs: int) -> None:
    pairs = comb(cells, 2)
    slow, fast = [1.0 + 0.01 * n for n in range(runs)], [2.0 + 0.01 * n for n in range(runs)]
    assert runs_to_judge(pairs) == runs
    assert significance(slow, fast, pairs) == "beyond noise"
    assert significance(slow[1:], fast[1:], pairs) == "not judged"


def test_chance_is_the_share_of_divisions_at_least_so_far_apart() -> None:
    """Of 70 divisions of 8 runs 2 are as far apart as can be, 2 come next: 0.029 and 0.057."""
    assert significance([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]) == "beyond noise"
    assert significance([1.0, 2.0, 3.0, 5.0], [4.0, 6.0, 7.0, 8.0]) == "within noise"


def test_three_runs_of_two_cells_are_not_judged_however_far_apart() -> None:
    assert significance([1.0, 1.1, 1.2], [9.0, 9.1, 9.2]) == "not judged"
    assert significance([], [9.0]) == "not judged"


def test_one_run_is_judged_against_many() -> None:
    others = [1.0 + 0.01 * number for number in range(39)]
    assert significance([9.0], others) == significance(others, [9.0]) == "beyond noise"
    assert significance([1.1], others) == "within noise"
    assert significance([9.0], others[1:]) == "not judged"


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_divisions_that_lie_equally_far_apart_count_whatever_their_rounding(offset: float) -> None:
    """Of the 20 divisions of 0 to 5, 2 are as far apart as 0, 1, 2 and 14 at least as far as 0, 4, 5."""
    low, high, mixed, others = (
        tuple(offset + 0.1 * number for number in of) for of in ((0, 1, 2), (3, 4, 5), (0, 4, 5), (1, 2, 3))
    )
    assert chance(((low, high),)) == pytest.approx(2 / 20)
    assert chance(((mixed, others),)) == pytest.approx(14 / 20)


def test_many_runs_are_judged_by_a_fixed_sample_of_divisions() -> None:
    generator = np.random.default_rng(3)
    left, right = list(generator.normal(10, 1, 20)), list(generator.normal(13, 1, 20))
    assert significance(left, right) == "beyond noise"
    assert significance(left, left[::-1]) == "within noise"


def test_percentile_is_interpolated() -> None:
    assert percentile_95([float(value) for value in range(21)]) == pytest.approx(19.0)
    assert percentile_95([float(value) for value in range(19)]) is None
    assert percentile_95([]) is None


def test_one_session_is_tested_as_runs_of_one_session_are() -> None:
    generator = np.random.default_rng(3)
    for sizes in ((5, 6), (4, 4), (7, 7), (2, 9)):
        left, right = (
            generator.lognormal(shift, 0.1, size) for shift, size in zip((0, 0.1), sizes, strict=True)
        )
        alone = chance(((tuple(left), tuple(right)),))
        assert alone == pytest.approx(float(chances([left], [right])[0]))


def test_runs_of_several_sessions_are_exchanged_within_each() -> None:
    """Three days with a run of each: of eight ways two are as far apart, the one seen and its mirror."""
    days = [([1.0], [1.1]), ([5.0], [5.1]), ([9.0], [9.1])]
    assert chance(tuple((tuple(a), tuple(b)) for a, b in days)) == 2 / 8
    assert stratified_significance(days) == "not judged"
    assert stratified_significance([*days, *days]) == "beyond noise"
    assert stratified_significance([([1.0], []), ([], [2.0])]) == "not judged"


def test_a_sample_of_divisions_stands_for_very_many() -> None:
    day = tuple(float(n) for n in range(7)), tuple(n + 0.5 for n in range(7))
    assert 0.3 < chance((day, day)) < 0.9
    apart = tuple(float(n) for n in range(7)), tuple(n + 20.0 for n in range(7))
    assert chance((apart, apart)) < 1e-4


@pytest.mark.parametrize("runs", [(4, 4), (1, 1, 1, 1, 1, 1), (2, 3)])
def test_days_that_differ_raise_no_more_false_alarms(runs: tuple[int, ...]) -> None:
    generator = np.random.default_rng(5)
    alarms = 0
    for _ in range(400):
        days = [generator.lognormal(day, 0.1, (2, count)).tolist() for day, count in enumerate(runs)]
        alarms += stratified_significance([(left, right) for left, right in days]) == "beyond noise"
    assert alarms / 400 <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


def test_walsh_averages_give_the_estimate_and_interval_of_published_tables() -> None:
    """Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, example 3.3 (nine patients)."""
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    middle, extent = walsh([y - x for x, y in zip(before, after, strict=True)])
    assert middle == pytest.approx(-0.46, abs=0.005)
    assert extent is not None
    assert (extent.low, extent.high) == (pytest.approx(-0.786, abs=5e-4), pytest.approx(-0.010, abs=5e-4))
    assert walsh([1.0, 2.0, 3.0, 4.0, 9.0]) == (pytest.approx(3.0), None)


@pytest.mark.parametrize("rounds", [6, 7, 12, 25])
def test_the_interval_of_ratios_holds_what_the_signed_rank_test_does_not_reject(rounds: int) -> None:
    values = np.random.default_rng(rounds).lognormal(0, 1, rounds)
    _, extent = walsh(values.tolist())
    assert extent is not None
    for bound, inside in ((extent.low, 1e-9), (extent.high, -1e-9)):
        assert wilcoxon(values - bound - inside, method="exact").pvalue > 1 - LEVEL
        assert wilcoxon(values - bound + inside, method="exact").pvalue <= 1 - LEVEL


def test_flips_of_whole_rounds_judge_all_questions_together() -> None:
    """Against a loop over all flips: step-down, the clearest first."""
    table = np.random.default_rng(2).normal([0.2, 0.3, 0.5], 1.0, (7, 3))
    scale = np.sqrt((table**2).sum(axis=0))
    seen = np.abs(table.sum(axis=0)) / scale
    flipped = [
        np.abs((np.array(of)[:, None] * table).sum(axis=0)) / scale for of in product((1, -1), repeat=7)
    ]
    expected, left, largest = dict.fromkeys(range(3), 0.0), [0, 1, 2], 0.0
    for column in sorted(range(3), key=lambda n: -seen[n]):
        largest = max(largest, float(np.mean([max(of[left]) >= seen[column] - 1e-12 for of in flipped])))
        expected[column] = largest
        left.remove(column)
    assert sign_flip_chances(table) == pytest.approx(list(expected.values()))


def test_one_question_is_the_sign_flip_test_of_scipy() -> None:
    for rounds in (7, 20):
        values = np.random.default_rng(rounds).normal(0.3, 1.0, rounds)
        by_scipy = permutation_test((values,), np.mean, permutation_type="samples", n_resamples=20_000)
        (found,) = sign_flip_chances(values[:, None])
        assert found == pytest.approx(by_scipy.pvalue, abs=0 if rounds == 7 else 0.02)


@pytest.mark.parametrize("rounds", first([6, 7], [6, 7, 15]))
def test_equal_cells_raise_a_false_alarm_in_at_most_one_of_twenty_tables(rounds: int) -> None:
    """Ten cells beside a base whose noise they share, heavy-tailed, with a machine that drifts."""
    generator = np.random.default_rng(rounds)
    alarms, tries = 0, 400
    for _ in range(tries):
        drift = np.linspace(0, generator.normal(), rounds)
        logs = generator.standard_t(2, (rounds, 11)) * 0.1 + drift[:, None]
        alarms += min(sign_flip_chances(logs[:, 1:] - logs[:, :1])) <= 1 - LEVEL
    assert alarms / tries <= 0.05 + 3 * (0.05 * 0.95 / tries) ** 0.5


def test_seven_rounds_settle_eleven_questions() -> None:
    table = np.random.default_rng(1).normal(1.0, 0.3, (7, 11))
    assert sign_flip_chances(table) == [2 / 2**7] * 11
