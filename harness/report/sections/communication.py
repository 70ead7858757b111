"""Communication by collective, dtype and group."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.record import CommunicationPart
from harness.report.document import Column, Paragraph, Section, Table
from harness.report.formats import megabytes, short
from harness.theory.expected.textbook import STEP_PHASES

Key = tuple[str, str, str, str, int]
PHASES = ("setup", "digest", *STEP_PHASES, "evaluation", "checkpoint")
MEANING = (
    "Forward, backward and step: per step. Setup, evaluation, checkpoint and digest (gathering the initial "
    "weights for their digest): in the whole run. Payload is the size of the whole tensors, largest MB that "
    "of the largest call."
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
    Column("largest_bytes", "largest MB", megabytes),
)


def communication_section(rows: Sequence[Row]) -> Section | None:
    """What rank 0 asked for: per step within the steps, else in the whole run; None if nothing counted."""
    body = []
    for group in group_repeats(rows):
        record = group.record
        counted = record.windows.counted if record.windows else 0
        kinds: dict[Key, list[CommunicationPart]] = {}
        for row in record.comm:
            if row.rank == 0:
                kinds.setdefault((row.phase, row.op, row.dtype, row.role, row.group_size), []).append(row)
        if counted:
            body += [
                [record.backend.label, record.world.world_size, *key, *_sums(kinds[key], times)]
                for key in sorted(kinds, key=_order)
                for times in (counted if key[0] in STEP_PHASES else 1,)
            ]
    if not body:
        return None
    table = Table(key="communication", columns=COLUMNS, rows=body)
    return Section("communication", "Collectives of rank 0", [Paragraph(MEANING), table])


def _sums(parts: Sequence[CommunicationPart], times: int) -> list[float | None]:
    """Calls and payload, divided by `times`, and the largest call's payload."""
    largest = [part.largest_bytes for part in parts if part.largest_bytes is not None]
    return [
        sum(part.calls for part in parts) / times,
        sum(part.payload_bytes for part in parts) / times,
        max(largest, default=None),
    ]


def _order(key: Key) -> tuple[int, Key]:
    return PHASES.index(key[0]) if key[0] in PHASES else len(PHASES), key
