"""How far one run lies from another: losses, gradient norms, how far the weights moved, final weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from harness.forms.layout import derived
from harness.record import Record, WeightsPart

Sketch = list[float]
Series: TypeAlias = npt.NDArray[np.float64]
"""A figure of every step, NaN where it has none."""
Norms: TypeAlias = Mapping[int, float]
"""Gradient norms by step."""


@dataclass(frozen=True, kw_only=True)
class StepPairs:
    """Losses and gradient norms of two runs over the steps that both have, the reference's first."""

    losses: tuple[Series, Series]
    norms: tuple[Series, Series]

    @property
    def loss_differences(self) -> Series:
        """Absolute, nats per token; NaN where one of them has no loss."""
        left, right = self.losses
        return np.abs(left - right)

    @property
    def largest_loss_difference(self) -> float | None:
        """None where no step has both losses."""
        return _largest(self.loss_differences)

    @property
    def norm_differences(self) -> Series:
        """Relative to the reference's; NaN where one of them is missing or the reference's is 0."""
        left, right = self.norms
        return np.abs(right - left) / np.where(left == 0, np.nan, left)


def step_pairs(reference: Record, record: Record) -> StepPairs:
    return aligned(series(reference), series(record))


def aligned(reference: tuple[Series, Series], other: tuple[Series, Series]) -> StepPairs:
    """Losses and gradient norms of two runs over the steps that both have."""
    common = min(len(reference[0]), len(other[0]))
    return StepPairs(
        losses=(reference[0][:common], other[0][:common]), norms=(reference[1][:common], other[1][:common])
    )


def series(record: Record) -> tuple[Series, Series]:
    losses = np.array([step.loss for step in record.steps], float)
    norms = np.array([step.gradient_norm for step in record.steps], float)
    return losses, norms


@dataclass(frozen=True, kw_only=True)
class Distance:
    """From a reference to a run; None: one of them lacks it."""

    loss: float | None = None
    """Largest absolute difference of a step's loss, nats per token."""
    norm: float | None = None
    """Largest difference of a step's gradient norm, relative to the reference's."""
    update: float | None = None
    """Difference of the distance from the initial to the final weights, relative to the reference's."""
    weights: float | None = None
    """Distance of the final weights, in units of how far the reference's moved."""
    parameters: dict[str, float] = field(default_factory=dict)
    """The same for each parameter, in units of how far this parameter of the reference moved."""


def distance(reference: Record, record: Record, both: StepPairs | None = None) -> Distance:
    """Distance over the steps that both have; `both` are their traces, if known."""
    both = both or step_pairs(reference, record)
    moved, other = movement(reference), movement(record)
    distances = sketch_distances(reference.final_weights, record.final_weights)
    total = _root_sum(moved.values())
    return Distance(
        loss=both.largest_loss_difference,
        norm=_largest(both.norm_differences),
        update=abs(_root_sum(other.values()) - total) / total if moved and other and total else None,
        weights=_root_sum(distances.values()) / total if distances and total else None,
        parameters={
            # What the reference leaves where it was has no scale of its own.
            name: value / (moved[name] or total)
            for name, value in distances.items()
            if moved.get(name) is not None and total
        },
    )


def norms_by_step(record: Record) -> Norms:
    """Gradient norms of the steps that have one."""
    return {step.step: step.gradient_norm for step in record.steps if step.gradient_norm is not None}


def moment_factors(reference: Record, record: Record) -> dict[str, float]:
    """Each parameter's gradients in the last steps over the reference's (second moments), over the median
    ratio: clipping passes one parameter's on to all."""
    mine, others = record.moment_norms, reference.moment_norms
    ratios = {n: mine[n][1] / others[n][1] for n in mine if n in others and others[n][1] > 0}
    common = median(ratios.values()) if ratios else 0.0
    return {name: ratio / common for name, ratio in ratios.items()} if common else {}


def norm_changes(reference: Norms, given: Norms) -> Series:
    """Relative differences of the norms that both have, with their sign, in order of steps."""
    common = sorted(step for step in reference.keys() & given.keys() if reference[step])
    return np.array([given[step] / reference[step] - 1.0 for step in common], float)


def standard_error(values: Series) -> float:
    """Standard error of the mean of at least two values."""
    return float(values.std(ddof=1)) / math.sqrt(values.size)


def _largest(values: Series) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else None


def relative(reference: float | None, given: float | None) -> float | None:
    """|given - reference| / reference; None where one is missing or the reference is 0."""
    if reference is None or given is None or not reference:
        return None
    return abs(given - reference) / reference


@derived
def movement(record: Record) -> dict[str, float]:
    """Estimated L2 distance of each parameter from its initial to its final value."""
    return sketch_distances(record.initial_weights, record.final_weights)


def sketch_distances(left: WeightsPart | None, right: WeightsPart | None) -> dict[str, float]:
    """Estimated L2 distance of each parameter that both hold in as many projections; empty without."""
    if left is None or right is None or left.sketch is None or right.sketch is None:
        return {}
    return {
        name: estimate(sketch, right.sketch[name])
        for name, sketch in left.sketch.items()
        if len(right.sketch.get(name, ())) == len(sketch)
    }


def relative_distance(left: WeightsPart, right: WeightsPart) -> float | None:
    """Estimated L2 distance of two sets of weights over the norm of the first; None: not known."""
    distances = sketch_distances(left, right)
    return _root_sum(distances.values()) / left.l2_norm if distances and left.l2_norm else None


def estimate(left: Sketch, right: Sketch) -> float:
    """L2 distance of two tensors from their projections: the root of their mean squared difference."""
    squares = [(a - b) * (a - b) for a, b in zip(left[1:], right[1:], strict=True)]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def standing_out(values: Mapping[str, float], times: float, least: float = 0.0) -> list[str]:
    """Names of the fewest that are larger than `least`, and so many times as large as any other; largest
    first; []: none are."""
    ranked = sorted(values, key=lambda name: -values[name])
    pairs = enumerate(pairwise(ranked), 1)
    return next((ranked[:n] for n, (a, b) in pairs if values[a] > max(least, times * values[b])), [])


def _root_sum(values: object) -> float:
    return math.sqrt(sum(value * value for value in values))  # type: ignore[attr-defined]
