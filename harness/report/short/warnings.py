"""Every kind of finding in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.cell import name_cells
from harness.judge.comparison import Comparison
from harness.judge.findings.groups import Statement, statements
from harness.judge.wording import counted, listed
from harness.report.document import Items, Line, Section
from harness.report.sections.findings import no_findings
from harness.report.short.budget import fitting, shortened
from harness.spec import Question

MOST_LINES = 6
MOST_WORDS = 100
"""Of the section, references included."""
WORDS_OF_LINE = 25
MOST_LABELS = 2


def warnings_section(comparison: Comparison, question: Question) -> Section:
    """One line for each kind, causes first; those that do not fit by name; or that there is none."""
    kinds: dict[str, list[Statement]] = {}
    for statement in statements(comparison.findings):
        kinds.setdefault(statement.id, []).append(statement)
    if not kinds:
        return Section("warnings", "Findings", [Line(no_findings(comparison), details="findings")])
    lines = fitting(
        [_line(alike) for alike in kinds.values()],
        most_lines=MOST_LINES, most_words=MOST_WORDS, link_words=1,
    )  # fmt: skip
    rest = list(kinds)[len(lines) :]
    more = [Line(f"{counted(len(rest), 'other kind')}: {listed(rest)}.", details="findings")] if rest else []
    return Section("warnings", "Findings", [Items([*lines, *more])])


def _line(alike: Sequence[Statement]) -> Line:
    """The first statement of a kind, and how many others there are."""
    first, rest = alike[0], len(alike) - 1
    where = f"{name_cells(first.cells, MOST_LABELS)}: " if first.cells else ""
    others = f" ({counted(rest, 'similar finding')})" if rest else ""
    text = shortened(f"{where}{first.text}", WORDS_OF_LINE - len(others.split()))
    return Line(f"{text}{others}", first.id, "findings")
