"""Optimizer states that the job wants in 8 bits and that are not."""

from __future__ import annotations

from harness.backends.optimizer_kinds import LOW_BIT
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row

WHY = {
    "adamw-8bit": "what a rank updates is no multiple of 256 elements, or below 4,096",
    "adamw-8bit-bnb": "what a rank updates is below 4,096 elements",
}


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judged)


def _judged(row: Row) -> Finding | None:
    observed = row.record.observed
    wide = observed.wide_optimizer_bytes if observed else None
    if row.record.job.optimizer.kind not in LOW_BIT or not wide:
        return None
    return Finding(
        id="low-bit-states-wide",
        about=row.cell,
        text=f"{wide:,} bytes of optimizer states are in full width although optimizer.kind is "
        f"{row.record.job.optimizer.kind}: {WHY[row.record.job.optimizer.kind]}",
        values={"wide_optimizer_bytes": wide},
    )
