"""Matrices that Muon orthogonalises in parts."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, Kind, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row

KINDS = (
    Kind(
        id="muon-on-parts",
        title="Muon orthogonalises parts of matrices",
        cause="Muon's update is a function of a whole matrix. A strategy that cuts matrices over ranks hands "
        "its optimizer parts, which can be orthogonalised too: each part then has orthonormal rows or "
        "columns by itself, and their union is another update, larger for tall matrices. Losses of a "
        "short run hardly show it.",
        confirm="`observed.matrices_in_parts` of the record; the gathers of the step are missing from the "
        "traffic.",
        fix="Gather each matrix before orthogonalising it, as `fsdp` does here, or use a strategy that keeps "
        "matrices whole (DDP).",
    ),
)


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
