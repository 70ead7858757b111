"""From which step on the step times are steady, so that the length of the warm-up follows from data.

The steady level is that of what MSER leaves; the steady state begins with the first step that is at this
level and stays there. MSER (K. P. White, 'An effective truncation heuristic for bias reduction in simulation
output', Simulation 69(6), 1997) cuts off the first d values, d up to n / 2, so that the squared standard
error of the mean of the rest, SSE(d) / (n - d)^2, is least. MSER-5 averages five values first, which a run
of some twenty steps is too short for; a running median of three (Tukey, 'Exploratory Data Analysis', 1977)
takes its place and keeps single outliers from moving d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.record import Record

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
