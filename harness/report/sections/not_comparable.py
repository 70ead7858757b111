"""Runs that trained another job than the others, in a table of their own with the reasons."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.report.document import Paragraph, Section
from harness.report.tables import not_comparable_table

TEXT = (
    "These runs finished, but trained a different job: other settings, initial weights, samples, tokens per "
    "step, learning rates or numbers of steps. They are excluded from every other table, picture, ranking "
    "and verdict of this report. The table names each differing field with both values; if the reference has "
    "no result, the run that most others agree with replaces it."
)


def not_comparable_section(comparison: Comparison) -> Section | None:
    """None where all runs of a job are one job."""
    table = not_comparable_table(comparison)
    if table is None:
        return None
    return Section("not_comparable", "Not comparable, and why", [Paragraph(TEXT), table])
