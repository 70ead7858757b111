"""Every kind of finding in one sentence."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.findings.groups import statements
from harness.report.document import Items, Line, Section
from harness.spec import Question


def warnings_section(comparison: Comparison, question: Question) -> Section:
    """The first sentence of each kind, causes first; or that there is none."""
    first: dict[str, str] = {}
    for statement in statements(comparison.findings):
        first.setdefault(statement.id, statement.sentence)
    if not first:
        return Section("warnings", "Findings", [Line("None.", details="findings")])
    return Section(
        "warnings", "Findings", [Items([Line(text, name, "findings") for name, text in first.items()])]
    )
