"""Names the mistake behind a wrong factor of losses or gradients."""

from __future__ import annotations

from harness.backends.mesh import SPLITTING, Mesh

SCALE_TOLERANCE = 5e-3
"""Relative. Low precision moves a norm by a few thousandths; factors differ by small integers."""


def known_factors(mesh: Mesh, accumulation_steps: int) -> dict[str, float]:
    """The factor by which each known mistake multiplies the gradients, by the mistake."""
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
    for name, size in mesh.sizes:
        if name not in SPLITTING and size > 1:
            known[f"added up {size} times over the {size} ranks along '{name}'"] = size
            known[f"divided by the {size} ranks along '{name}', which share samples"] = 1 / size
    return known


def name_scale(ratio: float, mesh: Mesh, accumulation_steps: int) -> list[str]:
    """The mistakes that explain a ratio of gradients; several if their factors coincide."""
    return [
        name
        for name, factor in known_factors(mesh, accumulation_steps).items()
        if abs(ratio / factor - 1) < SCALE_TOLERANCE
    ]
