"""Names the mistake behind a wrong factor of losses or gradients."""

from __future__ import annotations

from harness.backends.mesh import SPLITTING, Mesh
from harness.record import Record

SCALE_TOLERANCE = 5e-3
"""Relative. Low precision moves a norm by a few thousandths; factors differ by small integers."""


def micro_batches(record: Record) -> int:
    """Into which a pipeline cuts the batch of a micro-step; 1: it is none."""
    effective = record.backend.effective
    return int(effective.details.get("micro_batches") or 1) if effective else 1


def known_factors(mesh: Mesh, accumulation_steps: int, parts: int = 1) -> dict[str, float]:
    """The factor by which each known mistake multiplies the gradients, by the mistake.

    parts: the micro-batches into which a pipeline cuts the batch of a micro-step.
    """
    ranks, steps = mesh.data_size, accumulation_steps
    known: dict[str, float] = {}
    if ranks > 1:
        known[f"summed over {ranks} ranks instead of averaged"] = ranks
        known[f"divided by the {ranks} ranks again"] = 1 / ranks
    if steps > 1:
        known[f"not divided by the {steps} accumulation steps"] = steps
        known[f"divided by the {steps} accumulation steps again"] = 1 / steps
    if ranks > 1 and steps > 1:
        known[f"summed over {ranks} ranks and {steps} accumulation steps"] = ranks * steps
        known[f"divided by {ranks} ranks and {steps} accumulation steps again"] = 1 / (ranks * steps)
    if parts > 1:
        shown = f"the {parts} micro-batches of the pipeline"
        known[f"divided by {shown} (scale_grads)"] = 1 / parts
        known[f"not divided by {shown}"] = parts
    for name, size in mesh.sizes:
        if name not in SPLITTING and size > 1:
            known[f"added up {size} times over the {size} ranks along '{name}'"] = size
            known[f"divided by the {size} ranks along '{name}', which share samples"] = 1 / size
    return known


def name_scale(ratio: float, mesh: Mesh, accumulation_steps: int, parts: int = 1) -> list[str]:
    """The mistakes that explain a ratio of gradients; several if their factors coincide."""
    return [
        name
        for name, factor in known_factors(mesh, accumulation_steps, parts).items()
        if abs(ratio / factor - 1) < SCALE_TOLERANCE
    ]
