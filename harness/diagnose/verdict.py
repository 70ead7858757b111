"""What the gradients and updates of one step say of two runs: pure functions of sketches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.compare.distance import estimate
from harness.compare.explain import name_scale
from harness.compare.noise import UNIT_ROUNDOFF
from harness.record import Record

ROUNDING_UNITS = 1000.0
"""Tensors closer than so many units of rounding, relative to their size, agree."""
SAME_RATIO = 1e-3
"""Relative spread of ratios that count as one factor."""


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One parameter whose gradient or update differs."""

    name: str
    difference: float
    """Estimated L2 distance, relative to the first run's norm."""
    ratio: float
    """Size of the second run's over the first's."""


def step_to_examine(first: Record, second: Record) -> int | None:
    """The step in which two runs part; None if nothing differs by more than rounding.

    A loss that differs after equal ones was made by the update of the step before.
    """
    unit = UNIT_ROUNDOFF[first.job["training"]["precision"]]
    for a, b in zip(first.steps, second.steps, strict=False):
        if a.loss is None or b.loss is None:
            return max(0, a.step - 1)
        if abs(a.loss - b.loss) > 10 * unit * abs(a.loss):
            return max(0, a.step - 1)
        if a.gradient_norm and b.gradient_norm:
            if abs(a.gradient_norm - b.gradient_norm) > 10 * unit * a.gradient_norm:
                return a.step
    left, right = first.final_weights, second.final_weights
    if left and right and left.digest != right.digest and first.steps:
        return first.steps[0].step
    return None


def tensor_differences(
    first: dict[str, list[float]], second: dict[str, list[float]], precision: str
) -> list[TensorDifference]:
    """Parameters that differ by more than rounding, the farthest first."""
    limit = ROUNDING_UNITS * UNIT_ROUNDOFF["fp32"] if precision == "fp32" else 10 * UNIT_ROUNDOFF[precision]
    found = []
    for name, sketch in first.items():
        other = second.get(name, [0.0] * len(sketch))
        size = sketch[0] or max(other[0], 1e-30)
        apart = estimate(sketch, other) / size
        if apart > limit:
            found.append(TensorDifference(name=name, difference=apart, ratio=other[0] / size))
    return sorted(found, key=lambda tensor: -tensor.difference)


def conclude(
    first: dict[str, Any], second: dict[str, Any], world_size: int, accumulation_steps: int, precision: str
) -> list[str]:
    """Sentences on the gradients of a step, then on its updates."""
    said = []
    if first["gradients"] is None or second["gradients"] is None:
        said.append("gradients: one of the engines cannot gather them; only updates are compared")
    else:
        parted = tensor_differences(first["gradients"], second["gradients"], precision)
        said.append(_sentence("gradients", parted, first["gradients"], world_size, accumulation_steps))
    parted = tensor_differences(first["updates"], second["updates"], precision)
    said.append(_sentence("updates", parted, first["updates"], world_size, accumulation_steps))
    if said[0] == "gradients: all agree" and parted:
        said.append(
            "suspected: what stands between gradient and weight: clipping, learning rate, betas, epsilon, "
            "weight decay, dtype of masters, or parameters without an optimizer"
        )
    return said


def _sentence(
    what: str, parted: list[TensorDifference], every: dict[str, Any], world_size: int, accumulation: int
) -> str:
    if not parted:
        return f"{what}: all agree"
    ratios = [tensor.ratio for tensor in parted]
    one_factor = max(ratios) - min(ratios) <= SAME_RATIO * max(ratios)
    if one_factor and len(parted) == len([name for name, s in every.items() if s[0]]):
        causes = name_scale(ratios[0], world_size, accumulation)
        cause = f": {' or '.join(causes)}" if causes else ""
        return f"all {what} x {ratios[0]:.4g}{cause}"
    shown = ", ".join(f"{t.name} (x {t.ratio:.4g}, apart {t.difference:.1e})" for t in parted[:5])
    return f"{what}: {len(parted)} of {len(every)} tensors differ: {shown}"
