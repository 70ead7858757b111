"""Repeats of one cell together."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.rows import Row


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one job, backend and world size together, in their first order."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        record = row.record
        key = (record.job_id, record.backend.label, record.world.world_size)
        groups.setdefault(key, []).append(row)
    return list(groups.values())
