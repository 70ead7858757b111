"""What one record says of time: steps, phases, ranks, data loading, and utilisation of the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.forms.flops import (
    ModelGeometry,
    find_peak,
    hardware_flops_per_token,
    least_flops_per_token,
    model_flops_per_token,
)
from harness.judge.quantities import WHOLE, Run
from harness.judge.statistics import percentile_95
from harness.record import OverlapPart, Record


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What the devices of a run can do together."""

    flops_per_second: float
    source: str
    """A data sheet, or 'measured'."""


def p95_step_seconds(run: Run) -> float | None:
    """95th percentile of the timed steps; None without timed steps."""
    return percentile_95(run.step_seconds) if run.step_seconds else None


def rank_spread_seconds(run: Run) -> float | None:
    """Slowest rank's median step minus the fastest's; None without timed steps."""
    medians = run.rank_medians(WHOLE)
    return max(medians) - min(medians) if medians else None


def median_step(parts: Sequence[OverlapPart]) -> OverlapPart:
    """Of traced steps the one of median duration, of two in the middle the shorter: a whole step adds up."""
    return sorted(parts, key=lambda part: part.seconds)[(len(parts) - 1) // 2]


def geometry(record: Record) -> ModelGeometry | None:
    """The record's model for the closed forms; None where it does not say, or is a mixture of experts."""
    shape = record.model.geometry if record.model else None
    if shape is None or record.layout is None:
        return None
    blocks = tuple(f"{name}." for name in record.layout.blocks)
    return ModelGeometry(
        multiplying_parameters=shape.multiplying_parameters,
        block_parameters=sum(
            math.prod(part.shape) for part in record.layout.parameters if part.name.startswith(blocks)
        )
        if blocks
        else 0,
        layers=shape.layers,
        attention_width=shape.attention_width,
        sequence_length=record.job.data.sequence_length,
    )


def model_flops_per_second(run: Run) -> float | None:
    """Model FLOPs of the tokens trained on, over the duration of the timed steps, all ranks together."""
    shape, tokens = geometry(run.record), run.tokens_per_second
    return None if shape is None or tokens is None else model_flops_per_token(shape) * tokens


def hardware_flops_per_second(run: Run) -> float | None:
    """FLOPs really computed, padding and recomputation included, all ranks together."""
    shape, samples = geometry(run.record), run.samples_per_second
    if shape is None or samples is None:
        return None
    each = hardware_flops_per_token(shape, recomputation=recomputation(run.record))
    return each * shape.sequence_length * samples


def recomputation(record: Record) -> bool | str:
    """What the backward pass computes once more: nothing where the model as built does not recompute."""
    built = record.model is not None and record.model.activation_checkpointing
    return (record.job.training.activation_checkpointing or True) if built else False


def least_flops_per_second(run: Run) -> float | None:
    """What the devices must have done at the least."""
    shape, samples = geometry(run.record), run.samples_per_second
    if shape is None or samples is None:
        return None
    return least_flops_per_token(shape) * shape.sequence_length * samples


def peak_dtype(record: Record) -> str | None:
    """Dtype of the matrix products: 'tf32' where fp32 was allowed to become it."""
    effective = record.backend.effective
    if effective is None:
        return None
    dtype = effective.autocast_dtype or effective.parameter_dtype
    seen = record.observed.tf32 if record.observed else None
    tf32 = record.job.training.tf32 if seen is None else seen
    return "tf32" if dtype == "float32" and tf32 and record.world.device == "cuda" else dtype


def sheet_peak(record: Record) -> Peak | None:
    """Peak of all ranks' devices by data sheet; None where one of them is not in the table."""
    dtype = peak_dtype(record)
    found = [find_peak(rank.device_name, dtype) for rank in record.ranks] if dtype else []
    known = [peak for peak in found if peak is not None]
    if not known or len(known) < len(record.ranks):
        return None
    return Peak(
        flops_per_second=sum(rate for rate, _ in known),
        source="; ".join(dict.fromkeys(sheet for _, sheet in known)),
    )


def measured_peak(record: Record) -> Peak | None:
    """Peak of all ranks as their matrix products reached it; None where it was not asked for."""
    dtype = peak_dtype(record)
    rates = [rank.matmul_flops_per_second.get(dtype or "") for rank in record.ranks]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(record.ranks):
        return None
    return Peak(flops_per_second=sum(known), source="measured")


def share_of(flops_per_second: float | None, peak: Peak | None) -> float | None:
    """Utilisation: a rate over a peak; None if either is unknown."""
    if flops_per_second is None or peak is None:
        return None
    return flops_per_second / peak.flops_per_second
