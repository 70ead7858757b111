"""Frozen weights of a job with adapters that cost what only trained ones should."""

from __future__ import annotations

import math

from harness.forms.dtypes import DTYPE_BYTES
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.measures import REDUCTIONS
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import LayoutPart, Record
from harness.record.workload import layout_of

REDUCED_SHARE = 0.05
"""Of the frozen weights, beyond what trained ones may be padded by."""


def find(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run."""
    return [*of_cells(runs, _reduced), *of_cells(runs, _widened), *of_cells(runs, _cast)]


def _reduced(row: Row) -> Finding | None:
    record = row.record
    if record.layout is None or not record.layout.frozen:
        return None
    layout = layout_of(record.layout)
    reduced = _reduced_elements(record)
    frozen = layout.parameter_count - layout.trained_count
    padding = _most_padding(record)
    if reduced - layout.trained_count - padding <= REDUCED_SHARE * frozen:
        return None
    ratio = reduced / layout.trained_count
    return Finding(
        id="frozen-weights-reduced",
        about=row.cell,
        text=f"gradients of {reduced:,} elements are reduced in a backward pass, {ratio:.3g} x the "
        f"{layout.trained_count:,} that are trained: frozen weights cross the wire with them",
        values={"reduced_elements": reduced, "trained_elements": layout.trained_count},
    )


def _most_padding(record: Record) -> int:
    """Elements that libraries may add to trained weights so that each divides by the ranks: rows, at most."""
    if record.layout is None:
        return 0
    frozen, ranks = set(record.layout.frozen), record.world.world_size
    trained = [tensor.shape for tensor in record.layout.parameters if tensor.name not in frozen]
    return (ranks - 1) * sum(math.prod(shape[1:]) for shape in trained)


def _reduced_elements(record: Record) -> int:
    """Of the largest kind of reduction in the backward pass, on the rank where they are most.

    Per probed step, or micro-step where the library reduces in each.
    """
    steps = sum(step.window == "probed" for step in record.steps)
    effective = record.backend.effective
    every = effective is not None and effective.gradient_synchronisation == "every micro-step"
    passes = steps * (record.world.accumulation_steps if every else 1)
    sums: dict[tuple[int, str, str, str], float] = {}
    for row in record.comm:
        if row.phase == "backward" and row.op in REDUCTIONS and row.group_size > 1 and not row.of_job:
            key = row.rank, row.op, row.dtype, row.role
            sums[key] = sums.get(key, 0) + row.payload_bytes / DTYPE_BYTES[row.dtype]
    return round(max(sums.values(), default=0) / max(1, passes))


def _widened(row: Row) -> Finding | None:
    record = row.record
    if record.layout is None or record.observed is None or not record.observed.frozen_dtypes:
        return None
    built, held = _widest(_frozen_dtypes(record.layout)), _widest(record.observed.frozen_dtypes)
    if DTYPE_BYTES[held] <= DTYPE_BYTES[built]:
        return None
    ratio = DTYPE_BYTES[held] / DTYPE_BYTES[built]
    return Finding(
        id="frozen-dtype-differs",
        about=row.cell,
        text=f"frozen weights are held in {held}, the job's are {built}: {ratio:.3g} x their memory",
        values={"held": held, "job": built},
    )


def _cast(row: Row) -> Finding | None:
    record, effective = row.record, row.record.backend.effective
    if not record.job.adapter.is_present or record.job.training.precision != "fp32" or effective is None:
        return None
    computed = effective.autocast_dtype or effective.parameter_dtype
    if DTYPE_BYTES.get(computed, 4) >= DTYPE_BYTES["float32"]:
        return None
    return Finding(
        id="adapters-cast",
        about=row.cell,
        text=f"adapters compute in {computed}, the job's precision is fp32",
        values={"computed": computed},
    )


def _frozen_dtypes(layout: LayoutPart) -> list[str]:
    frozen = set(layout.frozen)
    return sorted({tensor.dtype for tensor in layout.parameters if tensor.name in frozen})


def _widest(dtypes: list[str]) -> str:
    return max(dtypes, key=lambda dtype: DTYPE_BYTES[dtype])
