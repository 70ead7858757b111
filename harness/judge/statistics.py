"""Repeats: median, 95th percentile, intervals, and which differences are beyond noise.

Whole runs are compared, never the steps within a run: steps of one run share their machine, moment and
placement and would make noise look smaller than it is. Nothing here supposes how runs are distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import combinations, count
from math import comb, prod
from statistics import median, quantiles
from typing import Literal, TypeAlias

import numpy as np

from harness.record import Record

LEVEL = 0.95
LEAST_FOR_P95 = 20
"""Of fewer values one lies beyond the 95th percentile at most, and it would be the largest in disguise."""
MOST_DIVISIONS = 20_000
"""Beyond these a fixed sample of divisions stands for all."""
SEED = 20260101

Significance = Literal["beyond noise", "within noise", "not judged"]
Stratum: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Runs of two cells that were made in one session."""


@dataclass(frozen=True)
class Interval:
    """Two bounds, both included."""

    low: float
    high: float


def percentile_95(values: Sequence[float]) -> float | None:
    """95th percentile, interpolated linearly; None of fewer than `LEAST_FOR_P95` values."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) >= LEAST_FOR_P95 else None


def value_range(values: Sequence[float]) -> Interval | None:
    """The smallest and the largest; None without values."""
    return Interval(min(values), max(values)) if values else None


def shown_interval(values: Sequence[float]) -> Interval | None:
    """The interval of the median, or the range where there are too few runs for one; None without values."""
    return median_interval(values) or value_range(values)


def median_known(values: Iterable[float | None]) -> float | None:
    """Median of those that are known; None: none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_interval(values: Sequence[float]) -> Interval | None:
    """Interval that holds the true median at `LEVEL` or more; None below `interval_runs()` runs.

    Between order statistics, as the sign test gives it (Conover, Practical Nonparametric Statistics).
    """
    return _bounds(tuple(sorted(values))) if len(values) >= interval_runs() else None


@lru_cache(maxsize=1024)
def _bounds(values: tuple[float, ...]) -> Interval:
    from scipy.stats import quantile_test  # a second to import: only if there are enough runs

    bounds = quantile_test(values, p=0.5).confidence_interval(LEVEL)
    return Interval(float(bounds.low), float(bounds.high))


@lru_cache
def interval_runs() -> int:
    """The fewest runs whose range holds the true median at `LEVEL`: 6."""
    return next(runs for runs in count(1) if 2 / 2**runs <= 1 - LEVEL)


@lru_cache
def runs_to_judge(comparisons: int = 1) -> int:
    """The fewest runs of each of two cells that can show a difference among so many comparisons."""
    return next(runs for runs in count(1) if comparisons * 2 / comb(2 * runs, runs) <= 1 - LEVEL)


def walsh(values: Sequence[float]) -> tuple[float, Interval | None]:
    """The Hodges-Lehmann estimate of the middle and its interval; None below `interval_runs()` values.

    The estimate is the median of the means of all pairs (Walsh averages); the interval leaves out as many of
    them at each end as Wilcoxon's signed-rank test allows, exactly.
    """
    found = np.array(values, float)
    averages = np.sort(((found[:, None] + found) / 2)[np.tril_indices(len(found))])
    middle = float(np.median(averages))
    if len(found) < interval_runs():
        return middle, None
    chances = np.ones(1)
    for rank in range(1, len(found) + 1):
        chances = np.convolve(chances, [0.5, *[0.0] * (rank - 1), 0.5])
    out = int(np.count_nonzero(np.cumsum(chances) <= (1 - LEVEL) / 2)) - 1
    return middle, Interval(float(averages[out]), float(averages[-1 - out]))


def sign_flip_chances(differences: Sequence[Sequence[float]] | np.ndarray) -> list[float]:
    """For each column, how often chance alone makes a difference as clear as this one in any column.

    Rows are rounds; equal cells may swap within one, so all columns change sign together, round by round,
    which keeps what they share. Step-down max-T (Westfall and Young, 1993): a difference that is shown is
    left out for those less clear. A missing figure is zero.
    """
    table = np.asarray(differences, float)
    rounds, columns = table.shape
    scale = np.sqrt((table**2).sum(axis=0))
    table = table / np.where(scale > 0, scale, 1.0)
    if 2**rounds <= MOST_DIVISIONS:
        signs = 1.0 - 2.0 * ((np.arange(2**rounds)[:, None] >> np.arange(rounds)) & 1)
    else:
        drawn = np.random.default_rng(SEED).choice([-1.0, 1.0], (MOST_DIVISIONS - 1, rounds))
        signs = np.vstack([np.ones(rounds), drawn])
    clear = np.abs(signs @ table)
    order = np.argsort(-clear[0], kind="stable")
    chances = np.zeros(columns)
    largest = 0.0
    for place, column in enumerate(order):
        most = clear[:, order[place:]].max(axis=1)
        largest = max(largest, float(np.mean(most >= clear[0, column] - 1e-12)))
        chances[column] = largest
    return chances.tolist()


def stratified_significance(strata: Sequence[Stratum], comparisons: int = 1) -> Significance:
    """Whether two cells differ by more than chance makes of equal ones, compared within sessions only.

    Permutation test of the difference of means (Fisher, Pitman), with several sessions of the sum of what
    they differ in each (van Elteren's design). Exact but for the sample that stands for more than
    `MOST_DIVISIONS` divisions, two-sided, by Bonferroni over `comparisons`, so that all of them together
    raise a false alarm in at most 1 - `LEVEL` of cases. Not judged where no figures of so few runs could
    show a difference.
    """
    if not is_testable(strata, comparisons):
        return "not judged"
    paired = [(tuple(values), tuple(base)) for values, base in strata if values and base]
    return "beyond noise" if chance(tuple(paired)) <= (1 - LEVEL) / comparisons else "within noise"


def is_testable(strata: Sequence[Stratum], comparisons: int = 1) -> bool:
    """Whether any figures of so many runs could show a difference."""
    divisions = prod(comb(len(values) + len(base), len(base)) for values, base in strata)
    return 2 / divisions <= (1 - LEVEL) / comparisons


@lru_cache(maxsize=1024)
def chance(strata: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]) -> float:
    """The share of all divisions within each stratum that lie at least as far apart as the runs do."""
    pools = [np.array([*values, *base], float) for values, base in strata]
    pools = [pool - pool.mean() for pool in pools]
    sizes = [len(values) for values, _ in strata]
    rounding = 1e-12 * sum(float(np.abs(pool).sum()) for pool in pools)
    least = abs(sum(float(pool[:size].sum()) for pool, size in zip(pools, sizes, strict=True))) - rounding
    if prod(comb(len(pool), size) for pool, size in zip(pools, sizes, strict=True)) <= MOST_DIVISIONS:
        every = (
            np.array([sum(part) for part in combinations(pool.tolist(), size)])
            for pool, size in zip(pools, sizes, strict=True)
        )
        sums = reduce(lambda left, right: np.add.outer(left, right).ravel(), every)
        return float(np.mean(np.abs(sums) >= least))
    generator = np.random.default_rng(SEED)
    drawn = np.zeros(MOST_DIVISIONS)
    for pool, size in zip(pools, sizes, strict=True):
        shuffled = generator.permuted(np.tile(pool, (MOST_DIVISIONS, 1)), axis=1)
        drawn += shuffled[:, :size].sum(axis=1)
    return float((1 + np.count_nonzero(np.abs(drawn) >= least)) / (1 + MOST_DIVISIONS))


LEAST_STEPS = 8
"""Fewer do not tell noise from a trend."""
SAME_SHARE = 0.05
"""Steps within this share of the steady median are no warm-up, however quiet the rest is."""
NOISE_WIDTHS = 3.0
"""Nor are steps within so many standard deviations."""
DEVIATION_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
SETTLED_STEPS = 5
"""A step at the steady level, with most of so many from it on, ends the warm-up: later ones are none."""


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Where the steady state begins in a series, and its level."""

    first: int
    """Index into the series."""
    seconds: float
    """Median of what follows."""


def steady_state(seconds: Sequence[float]) -> SteadyState | None:
    """The steady part of a series; None: too short, or still changing after half of it."""
    if len(seconds) < LEAST_STEPS:
        return None
    smooth = running_median(seconds)
    level = float(np.median(seconds[mser(smooth) :]))
    band = max(SAME_SHARE * level, NOISE_WIDTHS * noise_seconds(seconds))
    settled = (np.abs(np.asarray(smooth) - level) <= band).tolist()
    half = len(seconds) // 2
    for first in range(half):
        following = settled[first : first + SETTLED_STEPS]
        if settled[first] and following.count(True) > SETTLED_STEPS / 2:
            return SteadyState(first=first, seconds=level)
    return None


def noise_seconds(seconds: Sequence[float]) -> float:
    """Standard deviation of single steps, from the median difference of neighbours.

    Differences leave a trend out, which would otherwise pass for noise (J. von Neumann et al., 'The mean
    square successive difference', Annals of Mathematical Statistics 12(2), 1941).
    """
    return DEVIATION_SCALE * float(np.median(np.abs(np.diff(seconds)))) / math.sqrt(2)


def running_median(values: Sequence[float]) -> list[float]:
    """Median of each value and its neighbours; the first stays, since a slow first step is a warm-up."""
    series = np.asarray(values)
    before, here, after = series[:-2], series[1:-1], series[2:]
    inner = np.maximum(np.minimum(before, here), np.minimum(np.maximum(before, here), after))
    return [values[0], *inner.tolist(), float(np.median(values[-SETTLED_STEPS:]))]


def mser(values: Sequence[float]) -> int:
    """Index in the first half before which the values are cut off; the earliest of equal ones.

    From the end on, the squared deviations of each rest follow from its sum and sum of squares. Values are
    taken relative to the last one, which keeps the two sums small compared with what they are subtracted for.
    """
    backwards = np.asarray(values)[::-1] - values[-1]
    counts = np.arange(1, len(values) + 1)
    spread = np.cumsum(backwards**2) - np.cumsum(backwards) ** 2 / counts
    errors = (np.maximum(spread, 0.0) / counts**2)[::-1]
    return int(errors[: len(values) // 2 + 1].argmin())


def uninstrumented_steps(record: Record) -> tuple[list[int], list[float]]:
    """Numbers and seconds of the warm-up and timed steps; the others carry probes."""
    steps = [step for step in record.steps if step.window in ("warmup", "timed")]
    return [step.step for step in steps], [step.seconds for step in steps]


def steady_from(record: Record) -> int | None:
    """Number of the first steady step of a run; None: too few steps, or there is none."""
    numbers, seconds = uninstrumented_steps(record)
    found = steady_state(seconds)
    return None if found is None else numbers[found.first]
