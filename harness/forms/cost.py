"""GPU-hours and energy of 1e9 tokens at a rate of training."""

from __future__ import annotations

BILLION = 1e9
SECONDS_PER_HOUR = 3600.0
JOULES_PER_KILOWATT_HOUR = 3.6e6


def gpu_hours(tokens_per_second: float, gpus: int) -> float:
    """Hours of one GPU for 1e9 tokens where `gpus` together train `tokens_per_second`."""
    return BILLION / tokens_per_second * gpus / SECONDS_PER_HOUR


def kilowatt_hours(tokens_per_second: float, watts: float) -> float:
    """Energy for 1e9 tokens at this power and rate."""
    return BILLION / tokens_per_second * watts / JOULES_PER_KILOWATT_HOUR
