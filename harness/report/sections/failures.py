"""Cells that failed, ran out of memory or are unsupported."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.findings.groups import together
from harness.compare.repeats import Repeats, group_repeats
from harness.compare.rows import Row, reason
from harness.report.document import Items, Paragraph, Section


def failures_section(rows: Sequence[Row]) -> Section:
    """Each reason with its cells and their number of runs, or that every cell is whole."""
    cells: dict[str, list[str]] = {}
    for group in group_repeats(rows):
        for line in _lines(group):
            cells.setdefault(line, []).append(group.title)
    lines = [f"{together(titles)}{line}" for line, titles in cells.items()]
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Cells without a whole result", [block])


def _lines(group: Repeats) -> list[str]:
    """What is said of a cell for each status and kind of error, in the first wording of several."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in group.rows:
        record = row.record
        if (why := reason(record)) is not None:
            kind = record.error.kind if record.error else why
            reasons.setdefault((record.status, kind), []).append(why)
    runs = len(group.rows)
    return [
        f"{f', {len(whys)} of {runs} runs' if runs > 1 else ''}: {status}: {whys[0]}"
        for (status, _), whys in reasons.items()
    ]
