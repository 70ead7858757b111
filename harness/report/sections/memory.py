"""Memory by kind."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.report.document import Column, Paragraph, Section, Table
from harness.report.formats import megabytes

KINDS = ("weights", "gathered", "gradients", "masters", "optimizer", "communication", "buffers")


def memory_section(rows: Sequence[Row]) -> Section | None:
    """Live bytes by kind after the backward pass, the rank that holds most; None where nothing counted."""
    body = []
    for group in group_repeats(rows):
        record = group.record
        moments = [
            m.kinds for rank in record.ranks for m in rank.memory if m.moment == "after_backward" and m.kinds
        ]
        if moments:
            largest = max(moments, key=lambda held: sum(held.values()))
            sizes = [largest.get(kind, 0) for kind in KINDS]
            body.append([record.backend.label, record.world.world_size, *sizes])
    if not body:
        return None
    columns = [Column("backend", "backend", align="left"), Column("world_size", "ranks")]
    columns += [Column(f"{kind}_bytes", f"{kind} MB", megabytes) for kind in KINDS]
    text = (
        "Live tensors of the rank that holds most. Activations are gone by then; the peak in the table of "
        "results includes them."
    )
    table = Table(key="memory_after_backward", columns=columns, rows=body)
    return Section("memory", "Memory after the backward pass, by kind", [Paragraph(text), table])
