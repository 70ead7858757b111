"""Matrices that Muon orthogonalises in parts."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judged)


def _judged(row: Row) -> Finding | None:
    observed = row.record.observed
    parts = observed.matrices_in_parts if observed else None
    if not parts:
        return None
    return Finding(
        id="muon-on-parts",
        about=row.cell,
        text=f"of {parts} matrices no optimizer keeps the momentum whole: Muon orthogonalises what each rank "
        "holds of them, which is another update",
        values={"matrices_in_parts": parts},
    )
