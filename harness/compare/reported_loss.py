"""The loss that a backend reports beside the one that was computed: they are the same number, or altered."""

from __future__ import annotations

from typing import Literal

from harness.record import Record

TOLERANCE = 1e-6
"""Relative. An engine hands on what was computed; a cast of it to another device or fp32 changes less."""


def sums_of_step(
    record: Record, index: int, which: Literal["loss_sums", "computed_loss_sums"]
) -> list[float]:
    """Each rank's loss summed over its target tokens; empty where a rank has none."""
    per_rank = [getattr(rank, which) for rank in record.ranks]
    values = [sums[index] if len(sums) > index else None for sums in per_rank]
    return [] if None in values else values  # type: ignore[return-value]


def whole_loss(record: Record, index: int) -> float | None:
    """Mean loss per target token as it was computed, nats; None: not known."""
    sums = sums_of_step(record, index, "computed_loss_sums")
    return sum(sums) / record.steps[index].target_tokens if sums else None


def altered_step(record: Record) -> int | None:
    """Index of the first step in which a rank reported another loss than it computed; None: none."""
    for index in range(len(record.steps)):
        reported = sums_of_step(record, index, "loss_sums")
        computed = sums_of_step(record, index, "computed_loss_sums")
        if reported and computed:
            pairs = zip(reported, computed, strict=True)
            if any(abs(given - own) > TOLERANCE * abs(own) for given, own in pairs):
                return index
    return None


def of_one_rank(record: Record, index: int) -> bool:
    """Whether ranks beside rank 0 report nothing, or the loss of rank 0 in place of their own."""
    reported = sums_of_step(record, index, "loss_sums")
    if len(reported) < 2 or not reported[0]:
        return False
    if not any(reported[1:]):
        return True
    computed = sums_of_step(record, index, "computed_loss_sums")
    return len(set(reported)) == 1 and bool(computed) and len(set(computed)) > 1
