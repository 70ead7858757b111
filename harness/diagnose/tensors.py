"""Gradients and updates of one step by parameter: how far two runs differ, and what noise is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.judge.agreement.noise import BAND_FACTOR, TIGHT_FACTOR, UNIT_ROUNDOFF, UNMEASURED_FACTOR
from harness.judge.distance import Sketch, estimate
from harness.run_directory.events import ExaminedEvent

Sketches = Mapping[str, Sketch]


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What one step of one run did to each parameter."""

    gradients: Sketches | None
    """Of the global batch, before clipping; None: the engine cannot gather them."""
    updates: Sketches
    weight_norms: Mapping[str, float]
    """L2, before the update."""

    @classmethod
    def read(cls, event: ExaminedEvent) -> Examined:
        """From what a rank wrote, where numbers that are not finite are null."""
        return cls(
            gradients=None if event.gradients is None else _numbers(event.gradients),
            updates=_numbers(event.updates),
            weight_norms={k: math.inf if v is None else v for k, v in event.weight_norms.items()},
        )


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One parameter whose gradient or update differs by more than noise."""

    name: str
    difference: float
    """Estimated L2 distance, relative to the baseline's size."""
    allowed: float
    """The largest that rounding explains."""
    ratio: float | None
    """Size in the other run over that in the baseline; None: the baseline's is 0."""


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """One kind of tensors of one step in two runs."""

    beyond: tuple[TensorDifference, ...]
    """Farthest first."""
    compared: int
    common_factor: float | None
    """Where something differs and one factor over all tensors explains all of it."""


@dataclass(frozen=True, kw_only=True)
class TensorNoise:
    """The reference's step and its repetitions, which say what noise is for each parameter."""

    reference: Examined
    splits: Sequence[Examined]
    """Same precision, another order of sums."""
    others: Sequence[Examined]
    """Other precisions."""
    precision: str
    factor: float
    """1 between the reference and a run, 2 between two runs."""

    def gradient_limits(self) -> dict[str, float]:
        unit = UNIT_ROUNDOFF["fp32"]
        return self._limits("gradients", dict.fromkeys(self.reference.gradients or {}, unit))

    def update_limits(self) -> dict[str, float]:
        """An update is rounded to the spacing of the weight that it is added to."""
        unit, norms = UNIT_ROUNDOFF["fp32"], self.reference.weight_norms
        return self._limits(
            "updates",
            {
                name: unit * max(1.0, norms[name] / sketch[0] if sketch[0] else 1.0)
                for name, sketch in self.reference.updates.items()
            },
        )

    def _limits(self, kind: str, units: Mapping[str, float]) -> dict[str, float]:
        tight = self._level(kind, self.splits, TIGHT_FACTOR if self.splits else UNMEASURED_FACTOR, units)
        if self.precision == "fp32":
            return tight
        if not self.others:
            units = dict.fromkeys(units, UNIT_ROUNDOFF[self.precision])
        band = self._level(kind, self.others, BAND_FACTOR, units)
        return {name: max(tight[name], band[name]) for name in tight}

    def _level(
        self, kind: str, repeats: Sequence[Examined], factor: float, units: Mapping[str, float]
    ) -> dict[str, float]:
        reference = getattr(self.reference, kind)
        distances = [_distances(reference, getattr(repeat, kind)) for repeat in repeats]
        # Each tensor may be off by as much as the entire gradient: a small one is no more precise.
        overall = max((_overall(reference, getattr(repeat, kind)) for repeat in repeats), default=0.0)
        return {
            name: self.factor * factor * max([unit, overall, *(of_repeat[name] for of_repeat in distances)])
            for name, unit in units.items()
        }


def compare_tensors(first: Sketches, second: Sketches, limits: Mapping[str, float]) -> TensorComparison:
    """Tensors that differ by more than their limit; a tensor that is missing is one of zeros."""
    shape = {name: len(sketch) for name, sketch in {**first, **second}.items()}
    first = {name: first.get(name, [0.0] * length) for name, length in shape.items()}
    second = {name: second.get(name, [0.0] * length) for name, length in shape.items()}
    distances = _distances(first, second)
    beyond = [
        TensorDifference(
            name=name,
            difference=distances[name],
            allowed=limits.get(name, 0.0),
            ratio=second[name][0] / sketch[0] if sketch[0] else None,
        )
        for name, sketch in first.items()
        if not distances[name] <= limits.get(name, 0.0)
    ]
    return TensorComparison(
        beyond=tuple(sorted(beyond, key=lambda tensor: -tensor.difference)),
        compared=len(first),
        common_factor=_common_factor(first, second, limits) if beyond else None,
    )


def _common_factor(first: Sketches, second: Sketches, limits: Mapping[str, float]) -> float | None:
    size = _norm(first.values())
    factor = _norm(second.values()) / size if size else 0.0
    if not factor or not math.isfinite(factor):
        return None
    scaled = {name: [factor * value for value in sketch] for name, sketch in first.items()}
    left = _distances(scaled, second)
    return factor if all(left[name] <= limits.get(name, 0.0) for name in first) else None


def _distances(first: Sketches, second: Sketches) -> dict[str, float]:
    """Of each tensor, relative to its size in the first, or to that of all where it is zero there."""
    overall = _norm(first.values())
    return {
        name: estimate(sketch, second.get(name, [0.0] * len(sketch))) / (sketch[0] or overall or 1.0)
        for name, sketch in first.items()
    }


def _overall(first: Sketches, second: Sketches) -> float:
    """Distance of all tensors together, relative to their size in the first."""
    distances = [estimate(sketch, second[name]) for name, sketch in first.items() if name in second]
    return math.hypot(*distances) / (_norm(first.values()) or 1.0)


def _norm(sketches: Any) -> float:
    return math.hypot(*(sketch[0] for sketch in sketches))


def _numbers(sketches: Mapping[str, Sequence[float | None]]) -> Sketches:
    return {
        name: [math.inf if value is None else value for value in sketch] for name, sketch in sketches.items()
    }
