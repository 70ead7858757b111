"""Memory that is not what the strategy should hold, that grows, or that lies unevenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import median

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
        confirm="The values hold the growth per step of each rank, the median over all pairs of counted "
        "steps; it is there at every moment of the step. A tensor that is kept in some steps only shows from "
        "five counted steps on. On CUDA `measure.memory_snapshot: true` names the stack that allocated it.",
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
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """At most one finding of each kind per run."""
    looked = (look(row) for row in rows for look in (_differs, _grows, _imbalance))
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
    """Growth per step of what stays: the median slope over all pairs of counted steps (Theil-Sen); 0: none.

    A leak shows at every moment of a step. What a library holds for a while, such as a buffer of a
    collective that another thread finishes, shows at one; so of each step the moment counts at which it is
    least above the least of its kind. A single rise among several steps is no leak: a library allocates
    something once. Before the second step Adam has no states, so the first is left out.
    """
    floor = _floor(part)
    rises = [after - before > GROWTH_BYTES for (_, before), (_, after) in pairwise(floor)]
    if not any(rises) or (sum(rises) == 1 and len(rises) > 1):
        return 0
    slopes = [(after - before) / (later - earlier)
              for (earlier, before), (later, after) in combinations(floor, 2)]  # fmt: skip
    return max(0, int(median(slopes)))


def _floor(part: RankPart) -> list[tuple[int, int]]:
    """(step, bytes above the least of all steps) at the moment of the step where that is smallest."""
    above: dict[int, list[int]] = {}
    for moment in measures.STEP_MOMENTS:
        series = [
            (m.step, m.allocated_bytes)
            for m in part.memory
            if m.moment == moment and m.step > 0 and m.allocated_bytes is not None
        ]
        least = min((size for _, size in series), default=0)
        for step, size in series:
            above.setdefault(step, []).append(size - least)
    return [(step, min(sizes)) for step, sizes in sorted(above.items())]


def _imbalance(row: Row) -> Finding | None:
    if row.record.status not in ("ok", "diverged"):
        return None  # ranks were cut off at different moments
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
