"""The main table: one line per backend and world size, medians over repeats."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tabulate import tabulate

from harness.compare import measures
from harness.compare.parity import Parity
from harness.compare.rows import Row, reason
from harness.report.formats import markdown_text, megabytes, milliseconds, number, ranks, scientific

HEADERS = (
    "backend", "ranks", "status", "samples/s", "tokens/s", "step ms (min..max)",
    "peak MB/rank (spread)", "states MB", "sent MB/step", "textbook", "loss diff", "norm diff",
    "parity",
)  # fmt: skip
# Worst first: a row of repeats is as good as its worst one.
_LEVELS: tuple[Parity, ...] = ("diverged", "unjudged", "band", "tight", "exact")


def main_table(rows: Sequence[Row], style: str = "simple") -> str:
    """Render the main table in a style of tabulate ('simple', 'github', ...)."""
    body = [_line(group) for group in grouped(rows)]
    if style == "github":
        for line in body:
            line[0] = markdown_text(line[0])
    return tabulate(
        body, headers=HEADERS, tablefmt=style, disable_numparse=True,
        colalign=("left", "right", "left", *["right"] * 9, "left"),
    )  # fmt: skip


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one job, backend and world size together, in their first order."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        record = row.record
        key = (record.job_id, record.backend.label, record.world.world_size)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


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


def _line(rows: Sequence[Row]) -> list[str]:
    documents = [row.as_json() for row in rows]
    seconds = [s for row in rows for s in measures.step_seconds(row.record)]
    peaks = [p for row in rows for p in measures.peak_bytes(row.record)]
    record = rows[0].record
    spread = f" ({megabytes(max(peaks) - min(peaks))})" if peaks else ""
    times = (
        f"{milliseconds(median(seconds))} ({milliseconds(min(seconds))}..{milliseconds(max(seconds))})"
        if seconds
        else milliseconds(None)
    )
    return [
        record.backend.label,
        str(record.world.world_size),
        short_status(rows),
        number(_median(documents, "samples_per_second")),
        number(_median(documents, "tokens_per_second")),
        times,
        f"{megabytes(max(peaks) if peaks else None)}{spread}",
        megabytes(_median(documents, "model_state_bytes")),
        megabytes(_median(documents, "sent_bytes_per_step")),
        megabytes(_median(documents, "textbook_sent_bytes_per_step")),
        scientific(_largest(documents, "max_loss_difference")),
        scientific(_largest(documents, "max_grad_norm_difference")),
        min((row.judgement.parity for row in rows), key=_LEVELS.index),
    ]


def _median(documents: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [document[key] for document in documents if document[key] is not None]
    return median(values) if values else None


def _largest(documents: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [document[key] for document in documents if document[key] is not None]
    return max(values) if values else None
