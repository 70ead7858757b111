"""Loss curves, their differences to the reference, and the loss on held-out samples."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.report.document import Block, Column, Heading, Section, Table
from harness.report.formats import number
from harness.report.pictures.loss import loss_picture
from harness.report.tables import LABELS


def loss_section(comparison: Comparison) -> Section | None:
    """None without any loss."""
    picture = loss_picture(comparison)
    if picture is None:
        return None
    blocks: list[Block] = [picture]
    held_out = _held_out(comparison)
    if held_out:
        blocks += [Heading("Loss on held-out samples (nats per token)"), held_out]
    return Section("loss", "Loss", blocks)


def _held_out(comparison: Comparison) -> Table | None:
    steps = sorted({part.step for row in comparison.rows for part in row.record.eval})
    if not steps:
        return None
    body = []
    for row in comparison.rows:
        losses = {part.step: part.loss for part in row.record.eval}
        if losses:
            label = [*row.cell, row.record.repeat]
            body.append([*label, *(losses.get(step) for step in steps)])
    columns = [*LABELS, Column("repeat", "repeat")]
    columns += [Column(f"loss_after_step_{step}", f"after step {step}", number) for step in steps]
    return Table(key="held_out_loss", columns=columns, rows=body)
