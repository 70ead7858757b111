"""Communication by collective, dtype and group."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.report.document import Column, Paragraph, Section, Table
from harness.report.formats import megabytes, short
from harness.theory.expected.textbook import STEP_PHASES

Key = tuple[str, str, str, str, int]
PHASES = ("setup", "digest", *STEP_PHASES, "evaluation", "checkpoint")
MEANING = (
    "Forward, backward and step: per step. Setup, evaluation, checkpoint and digest (gathering the initial "
    "weights for their digest): in the whole run. Payload is the size of the whole tensor."
)
COLUMNS = (
    Column("backend", "backend", align="left"),
    Column("world_size", "ranks"),
    Column("phase", "phase", align="left"),
    Column("op", "collective", align="left"),
    Column("dtype", "dtype", align="left"),
    Column("role", "group", align="left"),
    Column("group_size", "size"),
    Column("calls", "calls", short),
    Column("payload_bytes", "payload MB", megabytes),
)


def communication_section(rows: Sequence[Row]) -> Section | None:
    """What rank 0 asked for: per step within the steps, else in the whole run; None if nothing counted."""
    body = []
    for group in group_repeats(rows):
        record = group.record
        counted = record.windows.counted if record.windows else 0
        totals: dict[Key, list[int]] = {}
        for row in record.comm:
            if row.rank == 0:
                key = (row.phase, row.op, row.dtype, row.role, row.group_size)
                total = totals.setdefault(key, [0, 0])
                total[0] += row.calls
                total[1] += row.payload_bytes
        if counted:
            body += [
                [record.backend.label, record.world.world_size, *key, calls / times, payload / times]
                for key, (calls, payload) in sorted(totals.items(), key=_order)
                for times in (counted if key[0] in STEP_PHASES else 1,)
            ]
    if not body:
        return None
    table = Table(key="communication", columns=COLUMNS, rows=body)
    return Section("communication", "Collectives of rank 0", [Paragraph(MEANING), table])


def _order(item: tuple[Key, list[int]]) -> tuple[int, Key]:
    phase = item[0][0]
    return PHASES.index(phase) if phase in PHASES else len(PHASES), item[0]
