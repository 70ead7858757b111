"""What saving and loading checkpoints cost, and where resumed runs began."""

from __future__ import annotations

from typing import Any

from harness.judge.comparison import Comparison
from harness.record import CheckpointPart, Record
from harness.tell.document import Block, Column, Paragraph, Section, Table
from harness.tell.formats import megabytes, milliseconds
from harness.tell.tables import LABELS

COSTS = (
    *LABELS,
    Column("operation", "operation", align="left"),
    Column("format", "format", align="left"),
    Column("step", "after step"),
    Column("checkpoint_seconds", "ms", milliseconds),
    Column("file_bytes", "files MB", megabytes),
    Column("payload_bytes", "payload MB", megabytes),
    Column("host_growth_bytes", "host growth MB", megabytes),
    Column("host_peak_bytes", "host peak MB", megabytes),
)
COSTS_TEXT = (
    "Of the first repeat. From a barrier to a barrier, files of the portable formats (consolidated, neutral) "
    "written to disk (fsync). payload: full tensors of the collectives that rank 0 called meanwhile. host "
    "peak: the most anonymous memory of a process (no mapped files), on the rank with most; host growth: the "
    "largest increase of a rank. Files were read right after they were written, from the page cache."
)
RESUMED = (
    *LABELS,
    Column("saved_by", "saved by", align="left"),
    Column("saved_on", "on ranks"),
    Column("format", "format", align="left"),
    Column("first_step", "first step"),
    Column("run_id", "run", align="left"),
)
RESUMED_TEXT = (
    "A resumed run is compared with the steps of the reference from its first step on; it loaded the weights "
    "that were saved, by their digest."
)
PHASES = {"save": "checkpoint", "load": "checkpoint_load"}


def checkpoints_section(comparison: Comparison) -> Section | None:
    """None if no run saved, loaded or continued a checkpoint."""
    groups = comparison.groups
    costs = [[*g.cell, *line] for g in groups for line in _costs(g.record)]
    resumed = [[*g.cell, *line] for g in groups for line in _resumed(g.record)]
    blocks: list[Block] = []
    if costs:
        blocks += [Table(key="checkpoints", columns=COSTS, rows=costs), Paragraph(COSTS_TEXT)]
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
