"""Memory of processes and devices beyond live tensors: reserved, fragmented, driver, pinned, resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.judge.comparison import Comparison
from harness.record import MemoryPart, Record
from harness.report.document import Block, Column, Paragraph, Table
from harness.report.formats import megabytes
from harness.report.tables import LABELS


def fragmentation_bytes(moment: MemoryPart) -> int | None:
    """What the caching allocator holds of the device and serves to nobody."""
    if moment.reserved_bytes is None or moment.allocated_bytes is None:
        return None
    return moment.reserved_bytes - moment.allocated_bytes


FIGURES: tuple[tuple[str, str, str, Callable[[MemoryPart], int | None]], ...] = (
    ("reserved", "reserved", "what the caching allocator holds of the device", lambda m: m.reserved_bytes),
    ("fragmentation", "fragmented", "reserved, but served to nobody at that moment", fragmentation_bytes),
    (
        "device_used",
        "driver",
        "the process's device memory as the driver counts it, context and NCCL included",
        lambda m: m.device_used_bytes,
    ),
    ("pinned", "pinned", "page-locked host memory that torch allocated", lambda m: m.pinned_bytes),
    ("file", "files", "into which states are swapped", lambda m: m.file_bytes),
    (
        "host_resident",
        "resident",
        "the process's resident set on the host, libraries included",
        lambda m: m.host_resident_bytes,
    ),
)
"""Key, title, meaning and value at one moment."""


def process_memory_blocks(comparison: Comparison) -> list[Block]:
    """A table of those figures that any record has, and why the driver's is missing; [] without any."""
    groups = comparison.groups
    records = [group.record for group in groups]
    known = [figure for figure in FIGURES if any(_by_rank(record, figure[3]) for record in records)]
    if not known:
        return []
    columns = [*LABELS]
    for key, title, _, _ in known:
        columns.append(Column(f"least_{key}_bytes", f"{title} MB, least", megabytes))
        columns.append(Column(f"most_{key}_bytes", f"{title} MB, most", megabytes))
    body: list[list[Any]] = []
    for group in groups:
        line: list[Any] = [*group.cell]
        for _, _, _, value in known:
            sizes = _by_rank(group.record, value)
            line += [min(sizes, default=None), max(sizes, default=None)]
        if any(size is not None for size in line[2:]):
            body.append(line)
    meanings = "; ".join(f"{title}: {meaning}" for _, title, meaning, _ in known)
    text = (
        "Beyond live tensors. Of each rank the largest figure over all moments recorded; least and most: on "
        f"the rank where that is smallest and largest. {meanings}."
    )
    unknown = _unknown(records)
    return [
        Paragraph(text),
        Table(key="process_memory", columns=columns, rows=body),
        *([Paragraph(f"The driver's figure is not known: {'; '.join(unknown)}.")] if unknown else []),
    ]


def _by_rank(record: Record, value: Callable[[MemoryPart], int | None]) -> list[int]:
    """The largest over a rank's moments, of each rank that has any."""
    found = ([size for m in part.memory if (size := value(m)) is not None] for part in record.ranks)
    return [max(sizes) for sizes in found if sizes]


def _unknown(records: Sequence[Record]) -> list[str]:
    """Reasons, each once."""
    moments = (m for record in records for part in record.ranks for m in part.memory)
    return sorted({m.device_used_unknown for m in moments if m.device_used_unknown})
