"""Linear layers that a job's fp8 does not reach."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judged)


def _judged(row: Row) -> Finding | None:
    observed = row.record.observed
    wide = observed.wide_linears if observed else None
    if not wide:
        return None
    return Finding(
        id="fp8-not-applied",
        about=row.cell,
        text=f"{wide} linear layers of the blocks do not multiply in fp8 although training.precision is fp8",
        values={"wide_linears": wide},
    )
