"""The lecture's profiler trace as figures: how a step divides, and what ranks waited for longest."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.speed import median_step
from harness.labs.document import GB, MISSING, LabTable, scaled, shown
from harness.labs.facts import Facts, cells, remarks, strategies
from harness.record import OverlapPart, Record

MS = 1e-3
NOTES = (
    "Of the traced step of median duration among all ranks, which the profiler slows down: computing, "
    "exposed communication and idling add up to it",
    "Hidden: share of the communication beside which something computes",
)


def waits_tables(records: Sequence[Record]) -> list[LabTable]:
    """A line for each strategy with its options."""
    headers = (
        "Strategy", "GPUs", "Step (ms)", "Computing (ms)", "Communication (ms)", "Exposed (ms)", "Idle (ms)",
        "Hidden (%)", "Longest wait for", "Peak memory (GB)",
    )  # fmt: skip
    body = [
        [cell.group.label, str(cell.ranks), *_divided(cell), shown(scaled(cell.figure("peak_bytes"), GB), 4)]
        for cell in strategies(cells(records))
    ]
    return [LabTable(headers=headers, rows=body, notes=[*NOTES, *remarks(records)])]


def _divided(cell: Facts) -> list[str]:
    parts = [part for rank in cell.record.ranks for part in rank.overlap]
    if not parts:
        return [MISSING] * 7
    step = median_step(parts)
    times = (
        step.seconds, step.compute_seconds, step.communication_seconds, step.exposed_seconds,
        step.idle_seconds,
    )  # fmt: skip
    return [*(shown(scaled(seconds, MS), 1) for seconds in times), shown(_hidden(step), 0), _longest(parts)]


def _hidden(step: OverlapPart) -> float | None:
    """In per cent; None without communication."""
    if not step.communication_seconds:
        return None
    return 100 * (1 - step.exposed_seconds / step.communication_seconds)


def _longest(parts: Sequence[OverlapPart]) -> str:
    waits = [wait for part in parts for wait in part.waits]
    if not waits:
        return MISSING
    wait = max(waits, key=lambda wait: wait.seconds)
    return f"{wait.name}, {wait.phase}"
