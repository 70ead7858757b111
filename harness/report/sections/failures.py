"""Cells that failed, ran out of memory or are unsupported."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.rows import Row, reason
from harness.report.document import Items, Section
from harness.report.formats import ranks


def failures_section(rows: Sequence[Row]) -> Section | None:
    """Each with its reason; None if every cell has a whole result."""
    lines = [
        f"{row.record.backend.label} on {ranks(row.record.world.world_size)}: {row.record.status}: {why}"
        for row in rows
        if (why := reason(row.record)) is not None
    ]
    return Section("failures", "Cells without a whole result", [Items(lines)]) if lines else None
