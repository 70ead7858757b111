"""How to run it again and how to check this report."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.report.document import Line, Section
from harness.spec import Question

VERIFY = "harness verify recomputes this file and its details from the records and names what differs:"


def check_section(comparison: Comparison, question: Question) -> Section:
    """Two lines, each with the details that hold the commands."""
    return Section(
        "check",
        "Reproduce and verify",
        [
            Line("Commands, versions and the complete configuration:", details="reproduce"),
            Line(VERIFY, details="records"),
        ],
    )
