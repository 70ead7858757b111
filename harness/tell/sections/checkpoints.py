"""What saving and loading checkpoints cost, and where resumed runs began."""

from __future__ import annotations

from typing import Any

from harness.judge.comparison import Comparison
from harness.record import CheckpointPart, Record
from harness.tell.document import Block, Paragraph, Section, Table
from harness.tell.tables import prose, table_columns

COSTS = table_columns("checkpoints_costs")
RESUMED = table_columns("checkpoints_resumed")
RESUMED_TEXT = prose("checkpoints_resumed")
PHASES = {"save": "checkpoint", "load": "checkpoint_load"}


def checkpoints_section(comparison: Comparison) -> Section | None:
    """None if no run saved, loaded or continued a checkpoint."""
    groups = comparison.groups
    costs = [[*g.cell, *line] for g in groups for line in _costs(g.record)]
    resumed = [[*g.cell, *line] for g in groups for line in _resumed(g.record)]
    blocks: list[Block] = []
    if costs:
        blocks += [Table(key="checkpoints", columns=COSTS, rows=costs), Paragraph(prose("checkpoints_costs"))]
    if resumed:
        blocks += [Table(key="resumed", columns=RESUMED, rows=resumed), Paragraph(RESUMED_TEXT)]
    return Section("checkpoints", "Checkpoints", blocks) if blocks else None


def _costs(record: Record) -> list[list[Any]]:
    """One line for each checkpoint saved or loaded, over all ranks."""
    return [_cost(record, parts) for parts in zip(*(r.checkpoints for r in record.ranks), strict=False)]


def _cost(record: Record, parts: tuple[CheckpointPart, ...]) -> list[Any]:
    first = parts[0]
    payload = sum(r.payload_bytes for r in record.comm if r.rank == 0 and r.phase == PHASES[first.operation])
    peaks = [part.host_peak_bytes for part in parts if part.host_peak_bytes is not None]
    growths = [
        part.host_peak_bytes - part.host_before_bytes
        for part in parts
        if part.host_peak_bytes is not None and part.host_before_bytes is not None
    ]
    seconds = max(part.seconds for part in parts)
    growth, peak = max(growths, default=None), max(peaks, default=None)
    return [first.operation, first.format, first.step, seconds, first.file_bytes, payload, growth, peak]


def _resumed(record: Record) -> list[list[Any]]:
    saved = record.resumed
    return [[saved.backend, saved.world_size, saved.format, saved.step, saved.run_id]] if saved else []
