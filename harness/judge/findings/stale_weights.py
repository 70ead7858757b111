"""Weights that forward passes use and that are not the masters."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judged)


def _judged(row: Row) -> Finding | None:
    moments = {"before the first step": row.record.initial_weights, "at the end": row.record.final_weights}
    stale = {
        when: (weights.stale_elements, weights.copied_elements or 0)
        for when, weights in moments.items()
        if weights is not None and weights.stale_elements
    }
    if not stale:
        return None
    counts = " and ".join(f"{count:,} of {of:,} {when}" for when, (count, of) in stale.items())
    return Finding(
        id="weights-in-use-stale",
        about=row.cell,
        text=f"weights in use are not their masters, rounded to their dtype: {counts}",
        values={when: {"stale": count, "copied": of} for when, (count, of) in stale.items()},
    )
