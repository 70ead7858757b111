"""What a wrong factor of losses or gradients stands for, by its value."""

from __future__ import annotations

SCALE_TOLERANCE = 5e-3
"""Relative. Low precision moves a norm by a few thousandths; scales are small whole numbers apart."""


def scales(world_size: int, accumulation_steps: int) -> dict[str, float]:
    """What a wrong scale of gradients stands for, by the factor that it multiplies them with."""
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
    """What a ratio of gradients may stand for; several where numbers coincide."""
    return [
        name
        for name, factor in scales(world_size, accumulation_steps).items()
        if abs(ratio / factor - 1) < SCALE_TOLERANCE
    ]
