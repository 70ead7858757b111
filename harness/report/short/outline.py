"""What the short report holds, in its order; every line refers to the details that show its evidence."""

from __future__ import annotations

from collections.abc import Callable

from harness.compare.comparison import Comparison
from harness.report.cells import report_cells
from harness.report.document import Document, Section
from harness.report.short.check import check_section
from harness.report.short.scope import scope_section
from harness.report.short.summary import summary_section
from harness.report.short.surprises import surprises_section
from harness.report.short.title import title
from harness.report.short.verdict import verdict_section
from harness.report.short.warnings import warnings_section
from harness.spec import Question

SECTIONS: tuple[Callable[[Comparison, Question], Section | None], ...] = (
    scope_section,
    verdict_section,
    summary_section,
    surprises_section,
    warnings_section,
    check_section,
)
MOST_WORDS = 1200
"""Of the short report as markdown, whatever the number of cells."""
MOST_PICTURES = 4


def short_document(comparison: Comparison, question: Question, details: Document) -> Document:
    """The short report that answers `question`, in front of its details."""
    sections = [section for make in SECTIONS if (section := make(comparison, question)) is not None]
    return Document(title(comparison, question), sections, details, report_cells(comparison))
