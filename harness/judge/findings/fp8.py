"""Linear layers that a job's fp8 does not reach."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, Kind, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row

KINDS = (
    Kind(
        id="fp8-not-applied",
        title="Linear layers do not multiply in fp8",
        cause="A library that replaces layers or wraps them anew can leave the fp8 layers behind, and "
        "filters of fp8 libraries skip layers without a word. Weights, states and traffic are the same "
        "either way, and losses nearly.",
        confirm="`observed.wide_linears` of the record.",
        fix="Convert the layers after whatever replaces them, and before the strategy shards them.",
    ),
)


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
