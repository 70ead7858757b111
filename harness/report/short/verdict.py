"""The verdict as lines that refer to their evidence."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.report.document import Section
from harness.report.sections import verdict
from harness.spec import Question


def verdict_section(comparison: Comparison, question: Question) -> Section:
    """What a reader should take away."""
    return verdict.verdict_section(comparison)
