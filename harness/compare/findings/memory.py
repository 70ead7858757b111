"""Memory that is not what the strategy should hold, that grows, or that lies unevenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from harness.compare import measures
from harness.compare.findings.finding import Finding, Kind, subject
from harness.compare.rows import Row
from harness.compare.states import rank_states, spread
from harness.record import RankPart, Record
from harness.theory.memory.terms import STATE_KINDS

STATES_TOLERANCE = 1e-3
"""Of a kind's closed form. The forms are exact; what is left room for is a library's next version."""
GROWTH_BYTES = 1024
"""Per step at every moment; libraries move scalars and events of a few bytes."""
IMBALANCE = 0.1
"""(largest - smallest) / mean over ranks. Padding of a model worth sharding is far below it."""

KINDS = (
    Kind(
        id="memory-differs",
        title="Measured model states are not what the closed form of the strategy gives",
        cause="The library holds something that its source did not hold when the form was written, keeps a "
        "copy, or runs in other dtypes than the job asks for.",
        confirm="The values hold the kind, both figures and the rank; the table of model states has the "
        "named terms of the form.",
        fix="Look for dtypes first: masters or optimizer states of half the size are bf16, gradients of "
        "twice the size are fp32 copies. Then compare the library's version with the one the form names.",
    ),
    Kind(
        id="memory-grows",
        title="Allocated memory grows from step to step",
        cause="Something keeps a tensor of every step: a loss with its graph in a list, a hook that stores "
        "activations, gradients that are never freed.",
        confirm="The values hold the growth per step of each rank; it is there at every moment of the step. "
        "On CUDA `measure.memory_snapshot: true` names the stack that allocated it.",
        fix="Store `loss.detach()` or a float, remove hooks after use, call `zero_grad(set_to_none=True)`.",
    ),
    Kind(
        id="memory-imbalance",
        title="Ranks hold very different amounts of memory",
        cause="One rank has a larger batch, or keeps what the others do not. What the strategy itself cuts "
        "unevenly is taken off first where a closed form knows it. Rank 0 alone or a mean over ranks would "
        "hide it.",
        confirm="The values hold the peak and the model states of every rank, and what closed forms expect.",
        fix="Look at what that rank alone does: logging, gathering, its samples.",
    ),
    Kind(
        id="one-wrap-unit",
        title="The whole model is one FSDP unit where one per transformer block was expected",
        cause="No wrap policy reached the blocks, so every forward and backward pass gathers all weights at "
        "once: no overlap, and a peak as if nothing were sharded.",
        confirm="The values hold the units, the blocks, and the most gathered weights seen in a forward "
        "pass.",
        fix="FSDP2: call `fully_shard` on each block before the root. FSDP1: `ModuleWrapPolicy` of the "
        "block's class. Accelerate: `transformer_cls_names_to_wrap`.",
    ),
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """At most one finding of each kind per run."""
    looked = (look(row) for row in rows for look in (_differs, _grows, _imbalance, _one_unit))
    return [finding for finding in looked if finding is not None]


def _differs(row: Row) -> Finding | None:
    found = []
    for states in rank_states(row.record):
        if states.expected is None:
            continue
        expected = states.expected.kinds()
        for kind in STATE_KINDS:
            measured, form = states.measured.get(kind, 0), expected.get(kind, 0)
            if abs(measured - form) > STATES_TOLERANCE * form:
                found.append(
                    {"rank": states.rank, "kind": kind, "measured_bytes": measured, "expected_bytes": form}
                )
    if not found:
        return None
    first = max(found, key=lambda f: abs(f["measured_bytes"] - f["expected_bytes"]))  # type: ignore[operator]
    return Finding(
        id="memory-differs",
        backends=(row.record.backend.label,),
        message=f"{subject(row)}: rank {first['rank']} holds {first['measured_bytes']} bytes of "
        f"{first['kind']} where the closed form has {first['expected_bytes']}",
        values={"differences": found},
    )


def _grows(row: Row) -> Finding | None:
    growth = {part.rank: grown for part in row.record.ranks if (grown := growth_bytes(part)) > GROWTH_BYTES}
    if not growth:
        return None
    return Finding(
        id="memory-grows",
        backends=(row.record.backend.label,),
        message=f"{subject(row)}: allocated memory grows by {max(growth.values())} bytes per step",
        values={"bytes_per_step_by_rank": {str(rank): grown for rank, grown in growth.items()}},
    )


def growth_bytes(part: RankPart) -> int:
    """The least growth per step over all moments of a step and all pairs of counted steps; 0: none.

    A leak shows at every moment. What a library holds for a while, such as a buffer of a collective that
    another thread finishes, shows at one. Before the second step Adam has no states, so the first is left
    out.
    """
    growths = []
    for moment in measures.STEP_MOMENTS:
        series = [
            (m.step, m.allocated_bytes)
            for m in part.memory
            if m.moment == moment and m.step > 0 and m.allocated_bytes is not None
        ]
        growths += [
            (after - before) // (later - earlier) for (earlier, before), (later, after) in pairwise(series)
        ]
    return max(0, min(growths, default=0))


def _imbalance(row: Row) -> Finding | None:
    peaks = _lasting_peaks(row.record)
    states = rank_states(row.record)
    held = [of_rank.measured_bytes for of_rank in states]
    expected = [of_rank.expected.model_state_bytes for of_rank in states if of_rank.expected is not None]
    uneven = (_unexpected_spread(peaks, expected), _unexpected_spread(held, expected))
    wide = [share for share in uneven if share is not None and share > IMBALANCE]
    if not wide:
        return None
    return Finding(
        id="memory-imbalance",
        backends=(row.record.backend.label,),
        message=f"{subject(row)}: memory differs over ranks by {max(wide):.0%} of its mean",
        values={
            "peak_bytes_by_rank": peaks,
            "model_state_bytes_by_rank": held,
            "expected_model_state_bytes_by_rank": expected,
        },
    )


def _unexpected_spread(held: list[int], expected: list[int]) -> float | None:
    """(largest - smallest) / mean over ranks, less what the closed forms say that each holds by design."""
    if len(expected) != len(held) or not held or not sum(held):
        return spread(held)
    beyond = [have - form for have, form in zip(held, expected, strict=True)]
    return (max(beyond) - min(beyond)) / (sum(held) / len(held))


def _lasting_peaks(record: Record) -> list[int]:
    """Per rank, the peak of the counted step in which it was least.

    What a rank holds it holds in every step; gloo's threads give buffers back when they come to it, so
    that the peak of a single step differs between ranks by chance.
    """
    lowest = []
    for part in record.ranks:
        steps: dict[int, int] = {}
        for held in part.memory:
            if held.moment in measures.STEP_MOMENTS and held.peak_bytes is not None:
                steps[held.step] = max(steps.get(held.step, 0), held.peak_bytes)
        if steps:
            lowest.append(min(steps.values()))
    return lowest


def _one_unit(row: Row) -> Finding | None:
    record = row.record
    effective = record.backend.effective
    if effective is None or record.layout is None or len(record.layout.blocks) < 2:
        return None
    sharded = (effective.get("details", {}).get("shard_size") or 1) > 1
    units = [unit for unit in effective.get("wrap_units") or [] if unit]  # the root apart
    if not sharded or len(units) >= len(record.layout.blocks):
        return None
    return Finding(
        id="one-wrap-unit",
        backends=(record.backend.label,),
        message=f"{subject(row)}: wrap units: root and {len(units)} of {len(record.layout.blocks)} blocks; "
        "what lies in no unit of its own is gathered with the root, without overlap",
        values={
            "wrap_units": len(units),
            "blocks": len(record.layout.blocks),
            "gathered_peak_bytes": gathered_peak_bytes(record),
        },
    )


def gathered_peak_bytes(record: Record) -> int | None:
    """The most gathered weights that any rank held at the end of a module's forward pass."""
    peaks = [
        m.gathered_peak_bytes
        for part in record.ranks
        for m in part.memory
        if m.gathered_peak_bytes is not None
    ]
    return max(peaks, default=None)
