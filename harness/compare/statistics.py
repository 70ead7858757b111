"""Repeats: median, 95th percentile, interval of the median, and which differences are beyond noise.

Whole runs are compared, never the steps within a run: steps of one run share their machine, moment and
placement and would make noise look smaller than it is. Nothing here supposes how runs are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import combinations, count
from math import comb, prod
from statistics import quantiles
from typing import Literal, TypeAlias

import numpy as np

LEVEL = 0.95
LEAST_FOR_P95 = 20
"""Of fewer values one lies beyond the 95th percentile at most, and it would be the largest in disguise."""
MOST_DIVISIONS = 20_000
"""Beyond these a fixed sample of divisions stands for all."""
SEED = 20260101

Significance = Literal["beyond noise", "within noise", "not judged"]
Stratum: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Runs of two cells that were made on one occasion."""


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


def pairs_among(cells: int) -> int:
    """How many comparisons are made where the best of some cells is sought: every pair may be the one."""
    return max(1, comb(cells, 2))


def significance(values: Sequence[float], base: Sequence[float], comparisons: int = 1) -> Significance:
    """Whether two sets of runs of one occasion differ by more than chance makes of equal ones."""
    return stratified_significance([(values, base)], comparisons)


def stratified_significance(strata: Sequence[Stratum], comparisons: int = 1) -> Significance:
    """Whether two cells differ by more than chance makes of equal ones, compared within occasions only.

    Permutation test of the difference of means (Fisher, Pitman), with several occasions of the sum of what
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
