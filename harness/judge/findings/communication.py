"""Runs that communicated something other than the closed form, or in other units than blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.forms.layout import DTYPE_BYTES, element_bytes
from harness.forms.peak_memory.families import most_gathered_bytes
from harness.forms.workload import ELSEWHERE
from harness.judge.effective import ALL_BUT_THE_LAST, EVERY_MICRO_STEP, counted_synchronisation
from harness.judge.findings.finding import Finding, Rules, found
from harness.judge.quantities import (
    REDUCTIONS,
    VolumeDifference,
    all_kinds,
    reduced_bytes,
    volume_differences,
    volume_of,
)
from harness.judge.rows import JudgedRun
from harness.judge.wording import sentence
from harness.record import MemoryPart, Record
from harness.record.workload import closed_form_layout, of_record

KIND = "communication-differs"


def volumes(row: JudgedRun) -> Iterator[Finding]:
    differences = volume_differences(row.record) if row.record.status in ("ok", "diverged") else []
    if not differences:
        return
    left, messages = list(differences), []
    while left:  # one clause per cause: two dtypes of one collective are one
        first = left.pop(0)
        partner = next((other for other in left if _in_its_place(first, other)), None)
        if partner is None:
            messages.append(_message(first, row.record.world.accumulation_steps))
            continue
        left.remove(partner)
        ran, due = (first, partner) if first.measured_bytes else (partner, first)
        sides = (ran.dtype, due.dtype) if ran.role == due.role else (_group(ran), _group(due))
        messages.append(
            sentence(
                KIND, "exchanged", op=ran.op, phase=ran.phase, runs_in=sides[0], wanted=sides[1],
                measured=ran.measured_bytes, expected=due.expected_bytes,
            )
        )  # fmt: skip
    values = {"differences": [vars(difference) for difference in differences]}
    yield Finding(id=KIND, about=row.cell, text="; ".join(messages), values=values)


def early(row: JudgedRun) -> Iterator[Finding]:
    """Of a backend without a closed form; one that shards gradients may reduce early, if it declares so.

    A script declares nothing: what it is said to do was counted. Without the last micro-step nobody may.
    """
    record, counted = row.record, counted_synchronisation(row.record)
    if record.status not in ("ok", "diverged") or counted not in (EVERY_MICRO_STEP, ALL_BUT_THE_LAST):
        return
    if counted == EVERY_MICRO_STEP and (volume_of(record) is not None or record.observation):
        return
    effective = record.backend.effective
    declared = effective.gradient_synchronisation if effective else None
    shards = effective is not None and effective.strategy in SHARDING_GRADIENTS
    if counted == ALL_BUT_THE_LAST or declared != counted or not (shards or _sharded(record)):
        values = {
            "early_reduced_bytes": max(rank.early_reduced_bytes or 0 for rank in record.ranks),
            "reduced_bytes": reduced_bytes(record), "declared": None if record.observation else declared,
        }  # fmt: skip
        micro_steps = record.world.accumulation_steps
        yield found("synchronised-early", row.cell, values, micro_steps=micro_steps, counted=counted)


def _in_its_place(one: VolumeDifference, other: VolumeDifference) -> bool:
    """Whether one is measured and not expected where the other is expected and not measured, in another
    dtype of the same group or in another group with the same dtype."""
    same = (one.phase, one.op) == (other.phase, other.op)
    alike = one.role == other.role or one.dtype == other.dtype
    lacks = one.measured_bytes == 0 and other.expected_bytes == 0
    return same and alike and (lacks or (other.measured_bytes == 0 and one.expected_bytes == 0))


def _group(difference: VolumeDifference) -> str:
    return difference.group if difference.role == ELSEWHERE else f"the {difference.role} group"


def _message(difference: VolumeDifference, accumulation_steps: int) -> str:
    measured, expected = difference.measured_bytes, difference.expected_bytes
    times = measured // expected if expected and measured % expected == 0 else 0
    case = "moves"
    if difference.role == "replica" and not measured:
        case = "never"
    elif times == accumulation_steps > 1 and "reduce" in difference.op:
        case = "every"
    return sentence(
        KIND, case, op=difference.op, dtype=difference.dtype, phase=difference.phase, measured=measured,
        expected=expected, times=times, group="" if difference.role == "world" else _group(difference),
    )  # fmt: skip


REDUCED_SHARE = 0.05
"""Of the frozen weights, beyond what trained ones may be padded by."""


def frozen_reduced(row: JudgedRun) -> Iterator[Finding]:
    record = row.record
    if record.layout is None or not record.layout.frozen:
        return
    layout = closed_form_layout(record.layout)
    reduced, trained = _reduced_elements(record), layout.trained_count
    frozen, left_out = layout.parameter_count - trained, set(record.layout.frozen)
    # Libraries may pad trained weights so that each divides by the ranks: by rows, at most.
    rows = (math.prod(t.shape[1:]) for t in record.layout.parameters if t.name not in left_out)
    padding = (record.world.world_size - 1) * sum(rows)
    if trained and reduced - trained - padding > REDUCED_SHARE * frozen:
        yield found(
            "frozen-weights-reduced", row.cell, {"reduced_elements": reduced, "trained_elements": trained}
        )


def _reduced_elements(record: Record) -> int:
    """Of the largest kind of reduction in the backward pass, on the rank where they are most.

    Per probed step, or micro-step where the library reduces in each.
    """
    steps = sum(step.window == "probed" for step in record.steps)
    effective = record.backend.effective
    every = effective is not None and effective.gradient_synchronisation == EVERY_MICRO_STEP
    passes = steps * (record.world.accumulation_steps if every else 1)
    sums: dict[tuple[int, str, str, str], float] = {}
    for row in record.comm:
        if row.phase == "backward" and row.op in REDUCTIONS and row.group_size > 1 and not row.of_job:
            key = row.rank, row.op, row.dtype, row.role
            sums[key] = sums.get(key, 0) + row.payload_bytes / (element_bytes(row.dtype) or 4)
    return round(max(sums.values(), default=0) / max(1, passes))


def frozen_widened(row: JudgedRun) -> Iterator[Finding]:
    layout, observed = row.record.layout, row.record.observed
    if layout is None or observed is None or not observed.frozen_dtypes:
        return
    frozen = set(layout.frozen)
    dtypes = sorted({tensor.dtype for tensor in layout.parameters if tensor.name in frozen})
    widths = {dtype: element_bytes(dtype) or 4 for dtype in (*dtypes, *observed.frozen_dtypes)}
    built, held = (max(of, key=widths.__getitem__) for of in (dtypes, observed.frozen_dtypes))
    ratio = widths[held] / widths[built]
    if ratio > 1:
        yield found("frozen-dtype-differs", row.cell, {"held": held, "job": built}, ratio=ratio)


def adapters_cast(row: JudgedRun) -> Iterator[Finding]:
    job, effective = row.record.job, row.record.backend.effective
    if not job.adapter.is_present or job.training.precision != "fp32" or effective is None:
        return
    computed = effective.autocast_dtype or effective.parameter_dtype
    if DTYPE_BYTES.get(computed, 4) < DTYPE_BYTES["float32"]:
        yield found("adapters-cast", row.cell, {"computed": computed})


BLOCKS_AT_ONCE = 2
"""The block that computes, and one gathered ahead; `prefetch=N` of a backend comes on top."""


def wrap_units(row: JudgedRun) -> Iterator[Finding]:
    """Blocks that are not listed as units, else listed, and yet more gathered at once than units could be."""
    layout, effective = row.record.layout, row.record.backend.effective
    if layout is None or effective is None:
        return
    units = [unit for unit in effective.wrap_units if unit]  # without the root
    forward = [m for part in row.record.ranks for m in part.memory if m.moment == "after_forward"]
    moments = [m for part in row.record.ranks for m in part.memory]
    most = [m.gathered_peak_bytes for m in moments if m.gathered_peak_bytes is not None]
    least = [m.gathered_least_bytes for m in forward if m.gathered_least_bytes is not None]
    values = {
        "wrap_units": len(units),
        "blocks": len(layout.blocks),
        "gathered_peak_bytes": max(most, default=None),
        "gathered_least_bytes": max(least, default=None),
        "root_and_largest_blocks_bytes": (limit := gathered_limit(row.record)),
    }
    if len(layout.blocks) > 1 and _sharded(row.record) and len(units) < len(layout.blocks):
        yield found("one-wrap-unit", row.cell, values, "not-listed")
    elif limit is not None and (_sharded(row.record) or set(layout.blocks) <= set(units)):
        seen = max((at_once(moment, limit) for moment in forward), default=0)
        if seen > limit:
            yield found("one-wrap-unit", row.cell, values, "not-there", seen=seen)


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


SHARDING_GRADIENTS = ("ZeRO stage 2", "ZeRO stage 3")
"""Strategies of DeepSpeed, as its engine says them of a third party's backend too."""


RULES = Rules(
    of_runs=(volumes, early, wrap_units),
    of_cells=(frozen_reduced, frozen_widened, adapters_cast),
)
