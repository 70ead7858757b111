"""The results in at most eight columns, relative to DDP on the same ranks."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.report.document import Line, Section
from harness.report.tables import results_table
from harness.spec import Question


def summary_section(comparison: Comparison, question: Question) -> Section:
    """One line per cell."""
    table = results_table(comparison.comparable)
    return Section("summary", "Results", [Line(f"{len(table.rows)} cells.", details="results")])
