"""Peaks of memory that were predicted before the runs, next to the measured ones."""

from __future__ import annotations

from statistics import mean
from typing import Any

from harness.judge.comparison import Comparison
from harness.report.document import Column, Paragraph, Section, Table
from harness.report.formats import megabytes, percent, signed_percent

COLUMNS = [
    Column("backend", "backend", align="left"),
    Column("world_size", "ranks"),
    Column("predicted_peak_bytes", "predicted peak MB", megabytes),
    Column("peak_bytes", "measured peak MB", megabytes),
    Column("prediction_error", "error", signed_percent),
    Column("moment", "predicted moment", align="left"),
]
MEANING = (
    "Peak of torch's allocator on the rank that needs most, predicted before the ranks started, and measured "
    "in the probed steps. Error: predicted over measured, minus one; over all cells {mean} on average and "
    "{worst} at most, regardless of sign."
)


def prediction_section(comparison: Comparison) -> Section | None:
    """The error of every prediction that a measurement belongs to; None without any."""
    lines: list[list[Any]] = []
    errors = []
    for group in comparison.groups:
        predicted, measured = group.figures["predicted_peak_bytes"], group.figures["peak_bytes"]
        if group.record.prediction is None or predicted is None or not measured:
            continue
        error = predicted / measured - 1
        errors.append(abs(error))
        lines.append([*group.cell, predicted, measured, error, group.record.prediction.moment])
    if not errors:
        return None
    text = MEANING.format(mean=percent(mean(errors)), worst=percent(max(errors)))
    table = Table(key="predictions", columns=COLUMNS, rows=lines)
    return Section("prediction", "Predicted memory", [Paragraph(text), table])
