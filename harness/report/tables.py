"""The main table: one line per backend and world size, medians over repeats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tabulate import tabulate

from harness.compare import measures
from harness.compare.parity import Parity
from harness.compare.rows import Row, reason
from harness.report.document import Column, Shown, Table
from harness.report.formats import megabytes, milliseconds, number, ranks, scientific
from harness.report.groups import grouped

COLUMNS = (
    Column("backend", "backend", align="left"),
    Column("world_size", "ranks"),
    Column("status", "status", align="left"),
    Column("samples_per_second", "samples/s", number),
    Column("tokens_per_second", "tokens/s", number),
    Column("step_seconds", "step ms (min..max)", milliseconds),
    Column("peak_bytes", "peak MB/rank (spread)", megabytes),
    Column("model_state_bytes", "states MB", megabytes),
    Column("sent_bytes_per_step", "sent MB/step", megabytes),
    Column("textbook_sent_bytes_per_step", "textbook", megabytes),
    Column("max_loss_difference", "loss diff", scientific),
    Column("max_grad_norm_difference", "norm diff", scientific),
    Column("parity", "parity", align="left"),
)
# Worst first: a row of repeats is as good as its worst one.
_LEVELS: tuple[Parity, ...] = ("diverged", "unjudged", "band", "tight", "exact")


def main_table(rows: Sequence[Row], style: str = "simple") -> str:
    """The main table for a terminal, in a style of tabulate."""
    table = results_table(rows)
    return tabulate(
        table.texts(), headers=[column.title for column in table.columns], tablefmt=style,
        disable_numparse=True, colalign=[column.align for column in table.columns],
    )  # fmt: skip


def results_table(rows: Sequence[Row]) -> Table:
    """One line per job, backend and world size."""
    return Table(key="results", columns=COLUMNS, rows=[_line(group) for group in grouped(rows)])


def short_status(rows: Sequence[Row]) -> str:
    """The status shared by repeats, or each with its count."""
    statuses = [row.record.status for row in rows]
    kinds = list(dict.fromkeys(statuses))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{k} x{statuses.count(k)}" for k in kinds)


def cell_line(row: Row) -> str:
    """One finished cell in one line, for a person who waits."""
    record = row.record
    head = f"{record.backend.label} on {ranks(record.world.world_size)}: {record.status}"
    why = reason(record)
    if why:
        return f"{head}: {why}"
    values = row.as_json()
    loss = record.steps[-1].loss if record.steps else None
    return (
        f"{head}, loss {number(loss)}, {number(values['tokens_per_second'])} tokens/s, "
        f"step {milliseconds(values['step_seconds'])} ms, peak {megabytes(values['peak_bytes'])} MB"
    )


def _line(rows: Sequence[Row]) -> list[Any]:
    documents = [row.as_json() for row in rows]
    seconds = [s for row in rows for s in measures.step_seconds(row.record)]
    peaks = [p for row in rows for p in measures.peak_bytes(row.record)]
    record = rows[0].record
    return [
        record.backend.label,
        record.world.world_size,
        short_status(rows),
        _median(documents, "samples_per_second"),
        _median(documents, "tokens_per_second"),
        _step_seconds(seconds),
        _peak(peaks),
        _median(documents, "model_state_bytes"),
        _median(documents, "sent_bytes_per_step"),
        _median(documents, "textbook_sent_bytes_per_step"),
        _largest(documents, "max_loss_difference"),
        _largest(documents, "max_grad_norm_difference"),
        min((row.judgement.parity for row in rows), key=_LEVELS.index),
    ]


def _step_seconds(seconds: Sequence[float]) -> Shown | None:
    if not seconds:
        return None
    middle = median(seconds)
    text = f"{milliseconds(middle)} ({milliseconds(min(seconds))}..{milliseconds(max(seconds))})"
    return Shown(middle, text)


def _peak(peaks: Sequence[int]) -> Shown | None:
    if not peaks:
        return None
    return Shown(max(peaks), f"{megabytes(max(peaks))} ({megabytes(max(peaks) - min(peaks))})")


def _median(documents: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [document[key] for document in documents if document[key] is not None]
    return median(values) if values else None


def _largest(documents: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [document[key] for document in documents if document[key] is not None]
    return max(values) if values else None
