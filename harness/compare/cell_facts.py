"""What a timed cell does in a step: seconds, collectives, bytes, and how it gathers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from harness.compare.metrics import SENT, SPEED
from harness.compare.repeats import Repeats
from harness.forms.terms import STEP_PHASES
from harness.record import Record

GATHER = "all_gather"


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """What a cell does in a step, per rank."""

    label: str
    runs: int
    token_seconds: float
    """Seconds per token over all ranks, median over the runs."""
    collectives: float | None
    """Calls per step among several ranks, mean over ranks; None: not counted."""
    gathers: float | None
    """Of them those that gather weights."""
    sent_bytes: float | None
    """Per step, as on a ring."""
    units: int | None
    """Groups of parameters that are gathered at once; None: the backend does not say."""
    prefetch: str | None
    """How gathering runs ahead, in the library's words; 'none': not at all; None: it does not say."""


def cell_facts(group: Repeats) -> CellFacts:
    """The facts of a timed cell. Its collectives and settings are those of the first run."""
    record = group.record
    effective = record.backend.effective
    return CellFacts(
        label=group.label,
        runs=len(group.values(SPEED)),
        token_seconds=median(second for seconds in group.clock(SPEED).values() for second in seconds),
        collectives=calls_per_step(record),
        gathers=calls_per_step(record, GATHER),
        sent_bytes=group.median(SENT),
        units=len(effective.wrap_units) if effective else None,
        prefetch=effective.prefetch if effective else None,
    )


def calls_per_step(record: Record, op: str | None = None) -> float | None:
    """Collectives among several ranks that a rank starts per probed step, mean over ranks; `op`: of one sort.

    None where no step was probed.
    """
    probed = record.windows.probed if record.windows else 0
    if not probed or not record.ranks:
        return None
    counted_rows = (
        row for row in record.comm
        if row.phase in STEP_PHASES and row.group_size > 1 and op in (None, row.op)
    )  # fmt: skip
    return sum(row.calls for row in counted_rows) / probed / len(record.ranks)
