"""Runs that are not the same job as the others, apart from them, and why."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.report.document import Paragraph, Section
from harness.report.tables import not_comparable_table

TEXT = (
    "These runs ended, but did not train the job of the others: other settings, initial weights, samples, "
    "tokens per step, learning rates or numbers of steps. No figure of theirs stands beside another run's, "
    "in no table, picture, ranking or verdict of this report. The table names each field with both values; a "
    "reference without a result is replaced by the run that most others agree with."
)


def not_comparable_section(comparison: Comparison) -> Section | None:
    """None where all runs of a job are one job."""
    table = not_comparable_table(comparison)
    if table is None:
        return None
    return Section("not_comparable", "Not comparable, and why", [Paragraph(TEXT), table])
