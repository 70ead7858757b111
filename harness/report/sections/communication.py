"""Communication by collective, dtype and group."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.report.document import Column, Section, Table
from harness.report.formats import megabytes, short

COLUMNS = (
    Column("backend", "backend", align="left"),
    Column("world_size", "ranks"),
    Column("phase", "phase", align="left"),
    Column("op", "collective", align="left"),
    Column("dtype", "dtype", align="left"),
    Column("group_size", "group"),
    Column("calls_per_step", "calls/step", short),
    Column("payload_bytes_per_step", "payload MB/step", megabytes),
)


def communication_section(rows: Sequence[Row]) -> Section | None:
    """What rank 0 asked for in the counted steps; None where nothing was counted."""
    body = []
    for group in group_repeats(rows):
        record = group.record
        counted = record.windows.counted if record.windows else 0
        totals: dict[tuple[str, str, str, int], list[int]] = {}
        for row in record.comm:
            if row.rank == 0:
                key = (row.phase, row.op, row.dtype, row.group_size)
                total = totals.setdefault(key, [0, 0])
                total[0] += row.calls
                total[1] += row.payload_bytes
        if counted:
            body += [
                [record.backend.label, record.world.world_size, *key, calls / counted, payload / counted]
                for key, (calls, payload) in sorted(totals.items())
            ]
    if not body:
        return None
    table = Table(key="communication", columns=COLUMNS, rows=body)
    return Section("communication", "Communication of rank 0 per step", [table])
