"""The main table."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.rows import Row
from harness.report.document import Section
from harness.report.tables import results_table


def results_section(rows: Sequence[Row]) -> Section:
    """One line per job, backend and world size."""
    return Section("results", "Results", [results_table(rows)])
