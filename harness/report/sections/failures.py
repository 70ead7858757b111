"""Cells that failed, ran out of memory or are unsupported."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.cell import Cell, name_cells
from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats, job_marks
from harness.judge.rows import reason
from harness.record import Record
from harness.report.document import Items, Paragraph, Section

Alike = tuple[str, int, int, str, str | None]
"""Mark of the job, failed runs and all runs of a cell, status, reason without the rank that failed."""


def failures_section(comparison: Comparison) -> Section:
    """Each reason with its cells and their number of runs, or that no cell failed."""
    groups = comparison.groups
    marks = job_marks(groups)
    found: dict[Alike, list[tuple[Cell, Record]]] = {}
    for group in groups:
        for failed in _by_error(group):
            first = failed[0]
            why = reason(first, with_rank=False)
            alike = marks[first.job_id], len(failed), len(group.rows), first.status, why
            found.setdefault(alike, []).append((group.cell, first))
    lines = [_line(alike, cells) for alike, cells in found.items()]
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Failed and unsupported cells", [block])


def _line(alike: Alike, cells: Sequence[tuple[Cell, Record]]) -> str:
    """Cells of one job that failed alike; names the rank if it is the same one everywhere."""
    job, failed, runs, status, why = alike
    reasons = {reason(record) for _, record in cells}
    count = f", {failed} of {runs} runs{' of each' if len(cells) > 1 else ''}" if runs > 1 else ""
    shown = reasons.pop() if len(reasons) == 1 else why
    return f"{name_cells([cell for cell, _ in cells])}{job}{count}: {status}: {shown}"


def _by_error(group: Repeats) -> list[list[Record]]:
    """The failed runs of a cell, one list for each status and kind of error."""
    kinds: dict[tuple[str, str], list[Record]] = {}
    for row in group.rows:
        record = row.record
        if (why := reason(record)) is not None:
            kind = record.error.kind if record.error else why
            kinds.setdefault((record.status, kind), []).append(record)
    return list(kinds.values())
