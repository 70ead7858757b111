"""Runs whose communication or memory is not that of the closed form; memory that grows or is unbalanced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from harness.forms.layout import DTYPE_BYTES, element_bytes
from harness.forms.peak_memory.families import most_gathered_bytes
from harness.forms.workload import ELSEWHERE
from harness.judge import quantities
from harness.judge.effective import ALL_BUT_THE_LAST, EVERY_MICRO_STEP, counted_synchronisation
from harness.judge.findings.finding import Finding, Rules, found
from harness.judge.quantities import (
    REDUCTIONS,
    VolumeDifference,
    derived_states,
    rank_states,
    reduced_bytes,
    volume_differences,
    volume_of,
)
from harness.judge.rows import JudgedRun
from harness.judge.wording import sentence
from harness.nested import grouped, totals
from harness.record import MemoryPart, RankPart, Record
from harness.record.workload import of_record

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
    """Find early reductions without a closed form; who shards gradients may reduce early, if it declares so.

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
    layout = record.layout
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
    """Elements of the largest kind of reduction in the backward pass, on the rank where they are most.

    Per probed step, or micro-step where the library reduces in each.
    """
    steps = sum(step.window == "probed" for step in record.steps)
    effective = record.backend.effective
    every = effective is not None and effective.gradient_synchronisation == EVERY_MICRO_STEP
    passes = steps * (record.world.accumulation_steps if every else 1)
    sums = totals(
        ((row.rank, row.op, row.dtype, row.role), row.payload_bytes / (element_bytes(row.dtype) or 4))
        for row in record.comm
        if row.phase == "backward" and row.op in REDUCTIONS and row.group_size > 1 and not row.of_job
    )
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
    kept = moment.all_kinds().get("gathered", 0) > limit
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


SMALLEST_COPY = 0.25
"""Of the weights that a rank should hold. A copy of fp32 weights in half precision is half of them; batches,
losses and scalars of the harness itself are a few kilobytes."""
LASTING = ("after_backward", "after_step")


def hidden_copies(record: Record, reference: Record | None) -> list[dict[str, Any]]:
    """Bytes as large as a copy of a rank's weights: at most one per rank and kind.

    'gathered': as weights of other ranks; 'other': the backend lists them nowhere, which is judged against
    what the reference holds on the same sort of device.
    """
    if record.backend.claim is None and record.backend.own_forms is None:
        return []
    base = _least_unlisted(reference.ranks[0]) if reference is not None and reference.ranks else None
    parts = {part.rank: part for part in record.ranks}
    found = []
    for states in rank_states(record):
        if states.expected is None:
            continue
        form = states.expected.kinds()
        kinds = [("gathered", states.measured.get("gathered", 0), form.get("gathered", 0))]
        unlisted = _least_unlisted(parts[states.rank])
        if unlisted is not None and base is not None:
            kinds.append(("other", unlisted, base))
        found += [
            {"rank": states.rank, "kind": kind, "measured_bytes": measured, "expected_bytes": expected}
            for kind, measured, expected in kinds
            if measured - expected > SMALLEST_COPY * form.get("weights", 0) > 0
        ]
    return found


def _least_unlisted(part: RankPart) -> int | None:
    """What lasts: a transport may hold a buffer for a while, and the first step has no optimizer states."""
    found = [
        kinds["other"]
        for moment in part.memory
        if moment.step > 0 and moment.moment in LASTING and "other" in (kinds := moment.all_kinds())
    ]
    return min(found, default=None)


GROWTH_BYTES = 1024
"""Per step at every moment; libraries move scalars and events of a few bytes, the C library rounds blocks."""
LEAST_LATER_STEPS = 5
"""After the probed ones; of fewer nothing is said."""
LEAST_RISES = 3
"""Steps that end with more than any before them: a library allocates something once, or twice."""
MOST_COMPARED_STEPS = 200
"""Pairs of more would take long."""
SPIKE = 0.1
"""Beyond the usual peak, relative to it."""
LAZY = ("gradients", "optimizer")
"""Kinds that are made where a gradient arrives."""
IMBALANCE = 0.1
"""(largest - smallest) / mean over ranks. Padding of a model worth sharding is far below it."""


def differs(row: JudgedRun) -> Iterator[Finding]:
    """Model states that are not those of the closed form, and copies that no form lists."""
    told: list[dict[str, Any]] = []
    for states in rank_states(row.record):
        expected = states.expected.kinds() if states.expected is not None else {}
        told += [
            {
                "rank": states.rank, "kind": kind, "measured_bytes": states.measured.get(kind, 0),
                "expected_bytes": expected.get(kind, 0),
            }
            for kind in states.off
        ]  # fmt: skip
    reference = row.reference.record if row.reference else None
    told += hidden_copies(row.record, reference)
    told += copies_in_other_steps(row.record, reference)
    if told:
        first = max(told, key=lambda f: abs(f["measured_bytes"] - f["expected_bytes"]))
        yield found(
            "memory-differs", row.cell, {"differences": told},
            rank=first["rank"], kind=first["kind"], measured=first["measured_bytes"],
            expected=first["expected_bytes"], step=first.get("step"),
        )  # fmt: skip


LEAST_OTHER_STEPS = 4
"""That were not probed. Whatever the chance of a step that a thread of gloo holds a buffer after it, all of
four do and neither of two probed ones does in two of a hundred runs at most."""


def copies_in_other_steps(record: Record, reference: Record | None) -> list[dict[str, Any]]:
    """Bytes as large as a copy of a rank's weights that other steps leave than the probed ones: of each rank
    the step that leaves most.

    Not a leak, what the reference has kept by then, or states that the optimizer still has to make. Where
    nothing knows these, no run without a reference is judged, and no script, which may keep its batch.
    """
    if record.observation is not None or not record.ranks:
        return []
    others = reference.ranks if reference is not None and reference is not record else []
    theirs = _left(reference, others[0])[1] if reference and others else {}
    found, parts = [], {part.rank: part for part in record.ranks}
    for states in rank_states(record):
        part = parts[states.rank]
        form = states.expected.kinds() if states.expected is not None else {}
        if (not theirs and (not form or _data_decide(record))) or (
            (growth_bytes(record, part) or later_growth_bytes(record, part)) > GROWTH_BYTES
        ):
            continue
        to_come = max(0, form.get("optimizer", 0) - states.measured.get("optimizer", 0))
        weights = form.get("weights", states.measured.get("weights", 0))
        kept, beyond = 0, dict[int, int]()
        usual, left = _left(record, part)
        for step, size in left.items():
            kept = max(kept, theirs.get(step, 0))
            beyond[step] = size - max(kept, to_come)
        at_once = {step: size - quantities.held_by_transport(record, step) for step, size in beyond.items()}
        step = max(beyond, key=lambda step: (at_once[step], beyond[step]), default=0)
        over: float = at_once.get(step, 0)
        # Its threads hold a buffer after some steps, on a busy machine after most, hardly after all.
        if len(beyond) >= LEAST_OTHER_STEPS and record.world.collectives == "gloo":
            over = max(over, min(beyond.values()))
        if weights and over > max(SMALLEST_COPY * weights, GROWTH_BYTES):
            found.append(
                {"rank": states.rank, "kind": "unprobed", "step": step,
                 "measured_bytes": usual + beyond[step], "expected_bytes": usual}
            )  # fmt: skip
    return found


def _left(record: Record, part: RankPart) -> tuple[int, dict[int, int]]:
    """Most bytes that the allocator serves after a probed step, and what each other one leaves beyond."""
    ends = [
        m.allocated_bytes for m in part.memory if m.moment == "after_step" and m.allocated_bytes is not None
    ]
    usual, pairs = max(ends, default=0), zip(record.steps, part.step_allocated_bytes, strict=False)
    return usual, {step.step: size - usual for step, size in pairs if ends and size is not None}


def grows(row: JudgedRun) -> Iterator[Finding]:
    parts = row.record.ranks
    growth = {p.rank: grown for p in parts if (grown := growth_bytes(row.record, p)) > GROWTH_BYTES}
    if later := not growth:
        growth = {p.rank: grown for p in parts if (grown := later_growth_bytes(row.record, p)) > GROWTH_BYTES}
    if growth:
        values = {"bytes_per_step_by_rank": {str(rank): grown for rank, grown in growth.items()}}
        yield found("memory-grows", row.cell, values, largest=max(growth.values()), later=later)


def growth_bytes(record: Record, part: RankPart) -> int:
    """Growth per step of what stays: the median slope over all pairs of probed steps (Theil-Sen); 0: none.

    A leak shows at every moment of a step. What a library holds for a while, such as a buffer of a
    collective that another thread finishes, shows at one; so of each step the moment counts at which it is
    least above the least of its kind. A single rise is no leak: a library allocates something once, and an
    optimizer makes states where a gradient first arrives, so these are left out, and later steps must grow
    too. Before the second step Adam has no states, so the first is left out.
    """
    series = [
        (m.step, m.moment, m.allocated_bytes - (m.kinds or {}).get("optimizer", 0))
        for m in part.memory
        if m.moment in quantities.STEP_MOMENTS and m.step > 0 and m.allocated_bytes is not None
    ]
    least = {moment: min(of) for moment, of in grouped((moment, size) for _, moment, size in series).items()}
    above = grouped((step, size - least[moment]) for step, moment, size in series)
    lasting = [(step, min(sizes)) for step, sizes in sorted(above.items())]
    rises = [after - before > GROWTH_BYTES for (_, before), (_, after) in pairwise(lasting)]
    later = quantities.after_probed(record, part.step_allocated_bytes)
    if not any(rises) or (sum(rises) == 1 and (len(rises) > 1 or len(later) < 2)):
        return 0
    stops = len(later) > 1 and _median_slope(later) <= GROWTH_BYTES
    return 0 if stops else max(0, _median_slope(lasting))


def _median_slope(series: Sequence[tuple[int, int]]) -> int:
    """Median slope of (step, bytes) in bytes per step, over all pairs (Theil-Sen), or some steps of many."""
    some = series[:: 1 + len(series) // MOST_COMPARED_STEPS]
    return int(median((b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(some, 2)))


def later_growth_bytes(record: Record, part: RankPart) -> int:
    """Bytes per step by which steps after the probed ones leave more: 0 unless it rises again and again.

    Where data decide which parameters get a gradient, states are made as they come.
    """
    series = quantities.after_probed(record, part.step_allocated_bytes)
    if len(series) < LEAST_LATER_STEPS or _data_decide(record):
        return 0
    by_chance = record.world.collectives == "nccl"  # gloo's do not add up
    sizes = [size - (quantities.held_by_transport(record, at) if by_chance else 0) for at, size in series]
    most = list(accumulate(sizes, max))
    rises = [n for n in range(1, len(sizes)) if sizes[n] > most[n - 1] + GROWTH_BYTES]
    if len(rises) < LEAST_RISES or rises[-1] < len(sizes) // 2:
        return 0
    return max(0, _median_slope(series) - _states_made(part))


def _states_made(part: RankPart) -> int:
    """Bytes per step by which the optimizer's states grow in the probed steps, as LBFGS's history does."""
    held = [(m.step, m.all_kinds().get("optimizer", 0)) for m in part.memory if m.moment == "after_step"]
    of_steps = [(step, size) for step, size in held if step > 0]
    return max(0, _median_slope(of_steps)) if len(of_steps) > 1 else 0


def _data_decide(record: Record) -> bool:
    """Whether which parameters get a gradient, and so states, hangs on the samples."""
    return record.layout is not None and record.layout.unreached is None


def retries(row: JudgedRun) -> Iterator[Finding]:
    """CUDA: ranks whose allocator had to free its cache after the probed steps, where the timed ones are."""
    counts = {}
    for part in row.record.ranks:
        probed = [held.num_alloc_retries for held in part.memory if held.num_alloc_retries is not None]
        later = (part.num_alloc_retries or 0) - max(probed, default=0)
        if probed and later > 0:
            counts[part.rank] = later
    if counts:
        values = {"retries_by_rank": {str(rank): count for rank, count in counts.items()}}
        yield found("allocator-retries", row.cell, values, ranks=list(counts), most=max(counts.values()))


def spikes(row: JudgedRun) -> Iterator[Finding]:
    """The rank and step whose peak is farthest beyond the usual one, unless the reference's is as well."""
    looked = ((_spike(row.record, part), part.rank) for part in row.record.ranks)
    far = [(*spike, rank) for spike, rank in looked if spike is not None]
    if not far or _data_decide(row.record):
        return
    step, peak, usual, rank = max(far, key=lambda one: one[1] / one[2])
    reference = row.reference.record if row.reference is not None else row.record
    there = [_spike(reference, part) for part in reference.ranks] if reference is not row.record else []
    is_the_jobs = any(spike is not None and spike[0] == step for spike in there)
    if not is_the_jobs and not copies_in_other_steps(row.record, reference):
        values = {"rank": rank, "step": step, "peak_bytes": peak, "usual_peak_bytes": usual}
        probed = [quantities.probed_peak(part) for part in row.record.ranks if part.rank == rank]
        yield found("memory-spikes", row.cell, values, probed=usual in probed)


def _spike(record: Record, part: RankPart) -> tuple[int, int, int] | None:
    """Step, peak and usual peak of the later step with the largest; None: it is as usual.

    Usual is what the probed steps needed. Where data differ from step to step, it is also the median of the
    later ones, unless all of these need more.
    """
    peaks, probed = quantities.after_probed(record, part.step_peak_bytes), quantities.probed_peak(part)
    if len(peaks) < LEAST_LATER_STEPS or probed is None:
        return None

    def beyond(size: int, usual: int) -> bool:
        return size - usual > SPIKE * usual

    alike = len({*part.target_tokens}) == 1 and not quantities.counts_samples(record)
    level = record.observation is None and beyond(min(size for _, size in peaks), probed)
    usual = probed if alike or level else max(probed, int(median(size for _, size in peaks)))
    step, peak = max(peaks, key=lambda pair: pair[1])
    chance = 0 if level else quantities.held_by_transport(record, step)
    return (step, peak, usual) if beyond(peak - chance, usual) else None


def imbalance(row: JudgedRun) -> Iterator[Finding]:
    if row.record.status not in ("ok", "diverged"):
        return  # ranks were cut off at different moments
    peaks = _lasting_peaks(row.record)
    states = rank_states(row.record)
    held = {of_rank.rank: of_rank.measured_bytes for of_rank in states}
    forms = {s.rank: s.expected or derived_states(row.record, s.rank) for s in states if s.step > 0}
    expected = {rank: form.model_state_bytes for rank, form in forms.items() if form is not None}
    for of_rank in states:  # how an unknown optimizer's states are cut is its own design
        form = forms.get(of_rank.rank)
        if form is not None and form.unknown is not None:
            expected[of_rank.rank] += of_rank.measured.get("optimizer", 0)
    if _data_decide(row.record):
        peaks = {}
        held = {of.rank: of.measured_bytes - sum(of.measured.get(k, 0) for k in LAZY) for of in states}
    if row.record.world.mesh.size("pipeline") > 1:
        peaks = {}  # stages hold activations of other numbers of micro-batches, and one of them the logits
    gaps = (
        _gap("a peak", peaks, expected, by_chance=quantities.held_by_transport(row.record)),
        _gap("model states", held, expected),
    )
    wide = [gap for gap in gaps if gap and gap["share"] > IMBALANCE]
    if wide:
        values = {
            "peak_bytes_by_rank": list(peaks.values()),
            "model_state_bytes_by_rank": list(held.values()),
            "expected_model_state_bytes_by_rank": list(expected.values()),
        }
        yield found("memory-imbalance", row.cell, values, **max(wide, key=itemgetter("share")))


def _gap(what: str, held: dict[int, int], expected: dict[int, int], by_chance: int = 0) -> dict[str, Any]:
    """The ranks with most and least of something, as measured; {} if nothing was held or measured.

    share: of the mean of all ranks, the bytes between the two less what closed forms expect of each by design
    and what may differ by chance.
    """
    if not sum(held.values()):
        return {}
    design = expected if expected.keys() == held.keys() else dict.fromkeys(held, 0)
    beyond = {rank: size - design[rank] for rank, size in held.items()}
    most, least = max(beyond, key=beyond.__getitem__), min(beyond, key=beyond.__getitem__)
    return {
        "what": what, "largest": (most, held[most]), "smallest": (least, held[least]),
        "by_design": design[most] != design[least], "by_chance": by_chance,
        "share": max(0, beyond[most] - beyond[least] - by_chance) / fmean(held.values()),
    }  # fmt: skip


def _lasting_peaks(record: Record) -> dict[int, int]:
    """Peak of each rank in the probed step in which it was least.

    What a rank holds it holds in every step; gloo's threads give buffers back when they come to it, so
    that the peak of a single step differs between ranks by chance.
    """
    lowest = {}
    for part in record.ranks:
        steps: dict[int, int] = {}
        for held in part.memory:
            if held.moment in quantities.STEP_MOMENTS and held.peak_bytes is not None:
                steps[held.step] = max(steps.get(held.step, 0), held.peak_bytes)
        if steps:
            lowest[part.rank] = min(steps.values())
    return lowest


RULES = Rules(
    of_runs=(volumes, early, wrap_units, differs, grows, retries, spikes, imbalance),
    of_cells=(frozen_reduced, frozen_widened, adapters_cast),
)
