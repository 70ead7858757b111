"""Cells that failed, ran out of memory or are unsupported."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.repeats import Repeats, group_repeats
from harness.compare.rows import Row, reason
from harness.report.document import Items, Paragraph, Section


def failures_section(rows: Sequence[Row]) -> Section:
    """Each cell once with its reason and its number of runs, or that every cell is whole."""
    lines = [line for group in group_repeats(rows) for line in _lines(group)]
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Cells without a whole result", [block])


def _lines(group: Repeats) -> list[str]:
    """A line for each status and kind of error; of reasons that differ only in wording the first."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in group.rows:
        record = row.record
        if (why := reason(record)) is not None:
            kind = record.error.kind if record.error else why
            reasons.setdefault((record.status, kind), []).append(why)
    runs = len(group.rows)
    return [
        f"{group.title}{f', {len(whys)} of {runs} runs' if runs > 1 else ''}: {status}: {whys[0]}"
        for (status, _), whys in reasons.items()
    ]
