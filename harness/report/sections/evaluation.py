"""How fast held-out samples were evaluated."""

from __future__ import annotations

from statistics import median

from harness.judge import measures
from harness.judge.comparison import Comparison
from harness.report.document import Block, Column, Heading, Paragraph, Table
from harness.report.figures import figure_column
from harness.report.formats import milliseconds
from harness.report.tables import LABELS

TEXT = (
    "Evaluations between and after timed steps; of those before, memory is measured too. Each lasts from a "
    "synchronised device to a synchronised device, as long as on its slowest rank, fetching the batches and "
    "counting the collectives included. samples/s: of the median evaluation of a run, then the median over "
    "repeats. The last batch is padded to full size on every rank; padding does not count."
)
COLUMNS = (
    *LABELS,
    Column("evaluations", "evaluations"),
    Column("samples", "samples of each"),
    Column("evaluation_seconds", "median ms", milliseconds),
    figure_column("evaluation_samples_per_second", "samples/s"),
)


def evaluation_blocks(comparison: Comparison) -> list[Block]:
    """A line for each cell that was evaluated while its steps were timed; [] without any."""
    body = []
    for group in comparison.groups:
        timed = [pair for row in group.rows for pair in measures.timed_evaluations(row.record)]
        if timed:
            samples, seconds = timed[0][0], median(seconds for _, seconds in timed)
            rate = group.figures["evaluation_samples_per_second"]
            body.append([*group.cell, len(timed), samples, seconds, rate])
    if not body:
        return []
    return [Heading("Evaluation"), Table(key="evaluation", columns=COLUMNS, rows=body), Paragraph(TEXT)]
