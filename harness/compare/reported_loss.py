"""Whether the loss that a backend reports is the one that was computed."""

from __future__ import annotations

from typing import Literal

import numpy

from harness.record import Record

TOLERANCE = 1e-6
"""Relative. An engine hands on what was computed; a cast of it to another device or fp32 changes less."""


def sums_of_step(
    record: Record, index: int, which: Literal["loss_sums", "computed_loss_sums"]
) -> list[float]:
    """Each data rank's loss summed over its target tokens; empty where a rank has none."""
    mesh, found = record.world.mesh, [0.0] * record.world.data_size
    for rank in record.ranks:
        if mesh.counts_loss(rank.rank):
            sums = getattr(rank, which)
            value = sums[index] if len(sums) > index else None
            if value is None:
                return []
            found[mesh.data_rank(rank.rank)] += value
    return found if record.ranks else []


def whole_loss(record: Record, index: int) -> float | None:
    """Mean loss per target token as it was computed, nats; None: not known."""
    sums = sums_of_step(record, index, "computed_loss_sums")
    targets = record.steps[index].target_tokens
    return sum(sums) / targets if sums and targets else None


def altered_step(record: Record) -> int | None:
    """Index of the first step in which a rank reported another loss than it computed; None: none."""
    columns = [sums for rank in record.ranks for sums in (rank.loss_sums, rank.computed_loss_sums)]
    count = min((len(sums) for sums in columns), default=0)
    if not count:
        return None
    table = numpy.array([sums[:count] for sums in columns], dtype=float)  # None becomes NaN
    reported, computed = table[::2], table[1::2]
    altered = numpy.abs(reported - computed) > TOLERANCE * numpy.abs(computed)
    steps = numpy.flatnonzero(altered.any(axis=0) & ~numpy.isnan(table).any(axis=0))
    return int(steps[0]) if len(steps) else None


def of_one_rank(record: Record, index: int) -> bool:
    """Whether ranks other than 0 report nothing, or the loss of rank 0 in place of their own."""
    reported = sums_of_step(record, index, "loss_sums")
    if len(reported) < 2 or not reported[0]:
        return False
    if not any(reported[1:]):
        return True
    computed = sums_of_step(record, index, "computed_loss_sums")
    return len(set(reported)) == 1 and bool(computed) and len(set(computed)) > 1
