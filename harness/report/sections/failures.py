"""Cells that failed, ran out of memory or are unsupported."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.compare.cell import Cell, name_cells
from harness.compare.repeats import Repeats, group_repeats, job_marks
from harness.compare.rows import Row, reason
from harness.report.document import Items, Paragraph, Section

_RANK = re.compile(r" \(rank \d+\)")


def failures_section(rows: Sequence[Row]) -> Section:
    """Each reason with its cells and their number of runs, or that every cell is whole."""
    groups = group_repeats(rows)
    marks = job_marks(groups)
    cells: dict[tuple[str, str, str], list[tuple[Cell, str]]] = {}
    for group in groups:
        job = marks[group.record.job_id]
        for runs, why in _reasons(group):
            # Whichever rank failed first is named; the same error of another rank is the same reason.
            cells.setdefault((job, runs, _RANK.sub("", why)), []).append((group.cell, why))
    lines = [_line(job, runs, alike, why) for (job, runs, why), alike in cells.items()]
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Cells without a whole result", [block])


def _line(job: str, runs: str, cells: Sequence[tuple[Cell, str]], why: str) -> str:
    """Cells of one job that failed alike; `why` leaves out the rank, which is told where it is one."""
    wordings = {wording for _, wording in cells}
    each = " of each" if runs and len(cells) > 1 else ""
    said = wordings.pop() if len(wordings) == 1 else why
    return f"{name_cells([cell for cell, _ in cells])}{job}{runs}{each}: {said}"


def _reasons(group: Repeats) -> list[tuple[str, str]]:
    """How many runs of a cell, and their status with its reason, for each kind of error."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in group.rows:
        record = row.record
        if (why := reason(record)) is not None:
            kind = record.error.kind if record.error else why
            reasons.setdefault((record.status, kind), []).append(why)
    runs = len(group.rows)
    return [
        (f", {len(whys)} of {runs} runs" if runs > 1 else "", f"{status}: {whys[0]}")
        for (status, _), whys in reasons.items()
    ]
