"""Names the mistake behind a wrong factor of losses or gradients."""

from __future__ import annotations

SCALE_TOLERANCE = 5e-3
"""Relative. Low precision moves a norm by a few thousandths; factors differ by small integers."""


def known_factors(world_size: int, accumulation_steps: int) -> dict[str, float]:
    """The factor by which each known mistake multiplies the gradients, by the mistake."""
    ranks, steps = world_size, accumulation_steps
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
    return known


def name_scale(ratio: float, world_size: int, accumulation_steps: int) -> list[str]:
    """The mistakes that explain a ratio of gradients; several if their factors coincide."""
    return [
        name
        for name, factor in known_factors(world_size, accumulation_steps).items()
        if abs(ratio / factor - 1) < SCALE_TOLERANCE
    ]
