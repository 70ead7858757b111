"""Repeats: median, 95th percentile, interval of the median, and which differences are beyond noise.

Whole runs are compared, never the steps within a run: steps of one run share their machine, moment and
placement and would make noise look smaller than it is. Nothing here supposes how runs are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count
from math import comb
from statistics import quantiles
from typing import Literal

import numpy as np

LEVEL = 0.95
LEAST_FOR_P95 = 20
"""Of fewer values one lies beyond the 95th percentile at most, and it would be the largest in disguise."""
MOST_DIVISIONS = 20_000
"""Beyond these a fixed sample of divisions stands for all."""
SEED = 20260101

Significance = Literal["beyond noise", "within noise", "not judged"]


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


def median_interval(values: Sequence[float]) -> Interval | None:
    """Interval that holds the true median at `LEVEL` or more; None below `interval_runs()` runs.

    Between order statistics, as the sign test gives it: of n runs all lie on one side of the median with
    probability 2 / 2^n, and so on inwards.
    """
    ordered, runs = sorted(values), len(values)
    outside, cut = 0.0, 0
    while cut < runs and (outside := outside + 2 * comb(runs, cut) / 2**runs) <= 1 - LEVEL:
        cut += 1
    return Interval(ordered[cut - 1], ordered[runs - cut]) if cut else None


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
    """Whether two sets of runs differ by more than chance makes of equal ones.

    Permutation test of the difference of means (Fisher, Pitman), exact but for the sample that stands for
    more than `MOST_DIVISIONS` divisions, two-sided, by Bonferroni over `comparisons`, so that all of them
    together raise a false alarm in at most 1 - `LEVEL` of cases. Not
    judged where no figures of so few runs could show a difference.
    """
    allowed = (1 - LEVEL) / comparisons
    if not values or not base or 2 / comb(len(values) + len(base), len(base)) > allowed:
        return "not judged"
    return "beyond noise" if _chance(values, base) <= allowed else "within noise"


def _chance(values: Sequence[float], base: Sequence[float]) -> float:
    """Of all divisions of the runs into two such sets, the share with means at least so far apart."""
    runs = np.asarray([*values, *base], float)
    runs = runs - runs.mean()
    sums = np.abs(runs[_divisions(len(runs), len(values))].sum(axis=1))
    # The first division is the one that was measured; the margin is for rounding.
    return float(np.mean(sums >= sums[0] - 1e-12 * np.abs(runs).sum()))


@lru_cache(maxsize=16)
def _divisions(total: int, first: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Indices of the first set in each division, the measured one first: of all, or of a fixed sample."""
    if comb(total, first) <= MOST_DIVISIONS:
        return np.asarray(list(combinations(range(total), first)))
    shuffled = np.random.default_rng(SEED).permuted(
        np.tile(np.arange(total), (MOST_DIVISIONS - 1, 1)), axis=1
    )
    return np.vstack([np.arange(first), shuffled[:, :first]])
