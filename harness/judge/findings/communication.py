"""Runs that communicated something other than the closed form, or in other units than blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.backends.base import Effective
from harness.forms.model.layout import DTYPE_BYTES
from harness.forms.peak_memory.families import most_gathered_bytes
from harness.forms.workload import ELSEWHERE
from harness.judge.effective import EVERY_MICRO_STEP, counted_synchronisation
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.quantities import (
    REDUCTIONS,
    VolumeDifference,
    all_kinds,
    reduced_bytes,
    volume_differences,
    volume_of,
)
from harness.judge.rows import JudgedRun, Runs
from harness.record import LayoutPart, MemoryPart, Record
from harness.record.workload import closed_form_layout, of_record


def find_volumes(runs: Runs) -> list[Finding]:
    """One finding per run whose payload differs anywhere, by a single byte or more."""
    trained = [row for row in runs.rows if row.record.status in ("ok", "diverged")]
    looked = (look(row) for row in trained for look in (_differs, _early))
    return [finding for finding in looked if finding is not None]


def _differs(row: JudgedRun) -> Finding | None:
    differences = volume_differences(row.record)
    if not differences:
        return None
    messages = _messages(differences, row.record.world.accumulation_steps)
    return Finding(
        id="communication-differs",
        about=row.cell,
        text="; ".join(messages),
        values={"differences": [vars(difference) for difference in differences]},
    )


def _early(row: JudgedRun) -> Finding | None:
    """Of a backend without a closed form; one that shards gradients may reduce early, if it declares so."""
    record = row.record
    if volume_of(record) is not None or counted_synchronisation(record) != EVERY_MICRO_STEP:
        return None
    effective = record.backend.effective
    declared = effective.gradient_synchronisation if effective else None
    sharded = (record.backend.shard_size or 1) > 1
    if declared == EVERY_MICRO_STEP and sharded:
        return None
    early = max(rank.early_reduced_bytes or 0 for rank in record.ranks)
    return Finding(
        id="synchronised-early",
        about=row.cell,
        text=f"gradients are reduced in every micro-step: {early:,} of "
        f"{reduced_bytes(record):,} reduced bytes cross the wire before the last of "
        f"{record.world.accumulation_steps} micro-steps"
        + (f", although it declares: {declared}" if declared else ""),
        values={"early_reduced_bytes": early, "reduced_bytes": reduced_bytes(record), "declared": declared},
    )


def _messages(differences: Sequence[VolumeDifference], accumulation_steps: int) -> list[str]:
    """One clause per cause: two dtypes of one collective are one."""
    left = list(differences)
    messages = []
    while left:
        first = left.pop(0)
        partner = next((other for other in left if _in_its_place(first, other)), None)
        if partner is not None:
            left.remove(partner)
            messages.append(_exchange_message(first, partner))
        else:
            messages.append(_message(first, accumulation_steps))
    return messages


def _in_its_place(one: VolumeDifference, other: VolumeDifference) -> bool:
    """Whether one is measured and not expected where the other is expected and not measured, in another
    dtype of the same group or in another group with the same dtype."""
    same = (one.phase, one.op) == (other.phase, other.op)
    alike = one.role == other.role or one.dtype == other.dtype
    lacks = one.measured_bytes == 0 and other.expected_bytes == 0
    return same and alike and (lacks or (other.measured_bytes == 0 and one.expected_bytes == 0))


def _exchange_message(one: VolumeDifference, other: VolumeDifference) -> str:
    measured, expected = (one, other) if one.measured_bytes else (other, one)
    runs, wanted = (
        (measured.dtype, expected.dtype)
        if measured.role == expected.role
        else (_group(measured), _group(expected))
    )
    return (
        f"{measured.op} in {measured.phase} runs in {runs}, expected {wanted} "
        f"({measured.measured_bytes:,} bytes against {expected.expected_bytes:,})"
    )


def _group(difference: VolumeDifference) -> str:
    return difference.group if difference.role == ELSEWHERE else f"the {difference.role} group"


def _message(difference: VolumeDifference, accumulation_steps: int) -> str:
    measured, expected = difference.measured_bytes, difference.expected_bytes
    where = f"{difference.op} of {difference.dtype} in {difference.phase}"
    if difference.role != "world":
        where += f" in {_group(difference)}"
    figures = f"{where} moves {measured:,} bytes, expected {expected:,}"
    if difference.role == "replica" and not measured:
        return f"never reduces across replicas: {figures}"
    if expected and measured % expected == 0:
        times = measured // expected
        if times == accumulation_steps > 1 and "reduce" in difference.op:
            return f"synchronised at every micro-step: {figures}, {times} times as much"
        if times > 1:
            return f"{figures}, {times} times as much"
    return figures


REDUCED_SHARE = 0.05
"""Of the frozen weights, beyond what trained ones may be padded by."""


def find_frozen(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run."""
    return [*of_cells(runs, _reduced), *of_cells(runs, _widened), *of_cells(runs, _cast)]


def _reduced(row: JudgedRun) -> Finding | None:
    record = row.record
    if record.layout is None or not record.layout.frozen:
        return None
    layout = closed_form_layout(record.layout)
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


def _widened(row: JudgedRun) -> Finding | None:
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


def _cast(row: JudgedRun) -> Finding | None:
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


BLOCKS_AT_ONCE = 2
"""The block that computes, and one gathered ahead; `prefetch=N` of a backend comes on top."""


def find_wrap_units(runs: Runs) -> list[Finding]:
    """At most one finding per run: blocks that are not listed as units, else listed but not wrapped."""
    return [finding for row in runs.rows if (finding := _not_listed(row) or _not_there(row)) is not None]


def _not_listed(row: JudgedRun) -> Finding | None:
    layout, effective = row.record.layout, row.record.backend.effective
    if layout is None or effective is None or len(layout.blocks) < 2 or not _sharded(row.record):
        return None
    units = _units(effective)
    if len(units) >= len(layout.blocks):
        return None
    return _finding(
        row,
        f"wrap units: root and {len(units)} of {len(layout.blocks)} blocks; everything else is gathered with "
        "the root, without overlap",
    )


def _not_there(row: JudgedRun) -> Finding | None:
    """Every block is listed as a unit, and yet more was gathered at once than units could be."""
    layout, effective = row.record.layout, row.record.backend.effective
    if layout is None or effective is None:
        return None
    if not (_sharded(row.record) or set(layout.blocks) <= set(_units(effective))):
        return None
    limit = gathered_limit(row.record)
    if limit is None:
        return None
    seen = max((at_once(moment, limit) for moment in _forward(row.record)), default=0)
    if seen <= limit:
        return None
    return _finding(
        row,
        f"every block is listed as a unit, but a forward pass gathered {seen:,} bytes of weights at once, "
        f"more than the {limit:,} of root and largest blocks: blocks are not gathered one by one",
    )


def at_once(moment: MemoryPart, limit: int) -> int:
    """Bytes that this forward pass gathered at once.

    A strategy that gives gathered weights back after each unit is judged by the most that it held. One that
    keeps them for the backward pass holds all of them in the end; it is judged by the least, which it held
    at its first module.
    """
    kept = all_kinds(moment).get("gathered", 0) > limit
    return (moment.gathered_least_bytes if kept else moment.gathered_peak_bytes) or 0


def gathered_limit(record: Record) -> int | None:
    """Bytes of the root and the largest blocks; None if the record lacks them or nothing is sharded."""
    workload, effective = of_record(record), record.backend.effective
    if workload is None or effective is None or workload.shards < 2:
        return None
    width = DTYPE_BYTES.get(effective.gather_dtype or effective.parameter_dtype)
    if width is None:
        return None
    ahead = int(record.backend.options.get("prefetch") or 0)
    return most_gathered_bytes(workload, width, BLOCKS_AT_ONCE + ahead)


def _sharded(record: Record) -> bool:
    return (record.backend.shard_size or 1) > 1


def _units(effective: Effective) -> list[str]:
    """The root left out."""
    return [unit for unit in effective.wrap_units if unit]


def _forward(record: Record) -> list[MemoryPart]:
    return [m for part in record.ranks for m in part.memory if m.moment == "after_forward"]


def _finding(row: JudgedRun, message: str) -> Finding:
    record = row.record
    assert record.layout is not None
    assert record.backend.effective is not None
    moments = [m for part in record.ranks for m in part.memory]
    most = [m.gathered_peak_bytes for m in moments if m.gathered_peak_bytes is not None]
    least = [m.gathered_least_bytes for m in _forward(record) if m.gathered_least_bytes is not None]
    return Finding(
        id="one-wrap-unit",
        about=row.cell,
        text=message,
        values={
            "wrap_units": len(_units(record.backend.effective)),
            "blocks": len(record.layout.blocks),
            "gathered_peak_bytes": max(most, default=None),
            "gathered_least_bytes": max(least, default=None),
            "root_and_largest_blocks_bytes": gathered_limit(record),
        },
    )
