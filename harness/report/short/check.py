"""How to run it again and how to check this report."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.wording import counted
from harness.report.document import Code, Line, Section
from harness.report.sections.reproduce import commands_of
from harness.spec import Question

VERIFY = "harness verify FILE  # this report, in any format"
MOST_WORDS = 30
"""Of a command that is shown here."""


def check_section(comparison: Comparison, question: Question) -> Section:
    """The first command that made the runs, if it is short, and the one that verifies this report."""
    first, *others = commands_of(comparison)
    shown = [first] if len(first.split()) <= MOST_WORDS else []
    hidden = others if shown else [first, *others]
    more = f", {counted(len(hidden), 'more command')}" if hidden else ""
    return Section(
        "check",
        "Reproduce and verify",
        [
            Code("sh", "\n".join([*shown, VERIFY])),
            Line(f"To run it again: commit, versions, configuration{more}:", details="reproduce"),
            Line(
                "harness verify recomputes every line from the records and names what differs:",
                details="records",
            ),
        ],
    )
