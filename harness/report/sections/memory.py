"""Memory by moment and kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.judge import measures
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.report.document import Block, Column, Folded, Paragraph, Section, Table
from harness.report.formats import megabytes
from harness.report.sections.process_memory import process_memory_blocks
from harness.report.tables import LABELS

KINDS = (
    "weights", "gathered", "gradients", "masters", "optimizer", "activations", "communication", "buffers",
    "data", "other",
)  # fmt: skip
MOMENTS = {
    "after_setup": "after setup",
    "after_forward": "after forward",
    "after_backward": "after backward",
    "after_step": "after step",
    "during_evaluation": "evaluation",
    "during_checkpoint": "checkpoint",
    "during_checkpoint_load": "checkpoint loaded",
}
TEXT = (
    "Of the first repeat: live tensors of the rank that holds most at that moment, in the last probed "
    "step; each storage counts once. activations: what the last forward pass left behind for the backward "
    "pass. gathered: full weights gathered from the shards of several ranks, the own part included. "
    "communication: buffers that a library sends from or receives into. buffers: the model's own. data: "
    "samples held in memory. other: the allocator's rest. least and most: bytes that the allocator served "
    "then, on the rank with least and with most. peak: the most since the previous moment, on the rank where "
    "it is largest; of an evaluation, during one batch; of a checkpoint, while it is saved. Empty columns "
    "are left out."
)


def memory_section(comparison: Comparison) -> Section | None:
    """Live bytes by kind after the backward pass, and at the others; None if nothing was counted."""
    after_backward: list[list[Any]] = []
    others: list[list[Any]] = []
    for group in comparison.groups:
        head = group.cell
        for moment, title in MOMENTS.items():
            line = _line(group.record, moment)
            if line is not None:
                if moment == "after_backward":
                    after_backward.append([*head, *line])
                else:
                    others.append([*head, title, *line])
    if not others and not after_backward:
        return None
    columns = [
        *(Column(f"{kind}_bytes", f"{kind} MB", megabytes) for kind in KINDS),
        Column("least_allocated_bytes", "least MB", megabytes),
        Column("most_allocated_bytes", "most MB", megabytes),
        Column("peak_bytes", "peak MB", megabytes),
    ]
    table = _table("memory_after_backward", [*LABELS, *columns], after_backward)
    moments = _table(
        "memory_by_moment", [*LABELS, Column("moment", "moment", align="left"), *columns], others
    )
    blocks: list[Block] = [
        Paragraph(TEXT),
        table,
        *([Folded("Memory at the other moments", [moments])] if others else []),
        *process_memory_blocks(comparison),
    ]
    return Section("memory", "Memory after the backward pass, by kind", blocks)


def _table(key: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> Table:
    """Without the kinds that hold nothing in any line."""
    kinds = {f"{kind}_bytes" for kind in KINDS}
    kept = [
        index
        for index, column in enumerate(columns)
        if column.key not in kinds or any(row[index] != 0 for row in rows)
    ]
    return Table(
        key=key, columns=[columns[index] for index in kept], rows=[[row[i] for i in kept] for row in rows]
    )


def _line(record: Record, moment: str) -> list[int | None] | None:
    """Kinds of the largest rank, then least, most and peak over the ranks; None: not measured."""
    parts = measures.memory_at(record, moment)
    if not parts:
        return None
    kinds = measures.kinds_at(record, moment)
    allocated = [part.allocated_bytes for part in parts if part.allocated_bytes is not None]
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    sizes: list[int | None] = [kinds.get(kind, 0) if kinds else None for kind in KINDS]
    return [
        *sizes,
        min(allocated, default=None),
        max(allocated, default=None),
        max(peaks, default=None),
    ]
