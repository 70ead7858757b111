"""Repeats: median, 95th percentile, bootstrap intervals, and which differences are beyond noise.

Runs are resampled, never the steps within a run: steps of one run share their machine, moment and
placement and would make an interval too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

LEVEL = 0.95
RESAMPLES = 1999
FEWEST_RUNS = 3
"""Below three runs there is no interval, and no difference is judged."""
SEED = 20260101

Significance = Literal["beyond noise", "within noise", "not judged"]


@dataclass(frozen=True)
class Interval:
    """A percentile-bootstrap interval at `LEVEL`."""

    low: float
    high: float


def percentile_95(values: Sequence[float]) -> float | None:
    """95th percentile, interpolated linearly; None without values."""
    return float(np.percentile(values, 95)) if values else None


def median_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the median of runs; None below `FEWEST_RUNS`.

    Percentile bootstrap (Efron 1979), fixed seed: equal values give equal intervals.
    """
    if len(values) < FEWEST_RUNS:
        return None
    return _interval(_resampled_medians(tuple(values), SEED))


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Interval of median(values) / median(base), both resampled; None below `FEWEST_RUNS` or at zero."""
    if min(len(values), len(base)) < FEWEST_RUNS or min(base) <= 0:
        return None
    return _interval(_resampled_medians(tuple(values), SEED) / _resampled_medians(tuple(base), SEED + 1))


def significance(values: Sequence[float], base: Sequence[float]) -> Significance:
    """Whether the medians of two sets of runs differ by more than their spread explains."""
    interval = ratio_interval(values, base)
    if interval is None:
        return "not judged"
    return "within noise" if interval.low <= 1 <= interval.high else "beyond noise"


@lru_cache(maxsize=64)
def _resampled_medians(values: tuple[float, ...], seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    generator = np.random.default_rng(seed)
    return np.median(generator.choice(np.asarray(values, float), (RESAMPLES, len(values))), axis=1)


def _interval(samples: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Interval:
    low, high = np.percentile(samples, [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
