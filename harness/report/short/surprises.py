"""What differs from the textbook or from defaults, in a line each."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.surprises import Surprise, surprises
from harness.judge.wording import counted
from harness.report.document import Items, Line, Section
from harness.report.sections.surprises import KEY, TITLE
from harness.report.short.budget import fitting, shortened
from harness.spec import Question

MOST_LINES = 6
MOST_WORDS = 185
"""Of the section, references included."""
WORDS_OF_LINE = 35


def surprises_section(comparison: Comparison, question: Question) -> Section | None:
    """Those that bear on the question, largest effect first; None where there are none."""
    found = surprises(comparison.comparable, question)
    if not found:
        return None
    lines = fitting(
        [_line(surprise) for surprise in found],
        most_lines=MOST_LINES, most_words=MOST_WORDS, link_words=len(TITLE.split()),
    )  # fmt: skip
    rest = len(found) - len(lines)
    more = [Line(f"{counted(rest, 'smaller difference')}.", details=KEY)] if rest else []
    return Section("surprises", "What surprises here", [Items([*lines, *more])])


def _line(surprise: Surprise) -> Line:
    cells = surprise.short_cells
    text = shortened(sentence(surprise), WORDS_OF_LINE - len(cells.split()))
    return Line(text, cells, KEY)


def sentence(surprise: Surprise) -> str:
    """'1.5 x the textbook's bytes: ... (DeepSpeed 0.19.8, not the transport). Set ...'."""
    origin = f" ({surprise.origin})" if surprise.origin else ""
    return f"{surprise.what}{origin}. {surprise.behaviour.advice}".strip()
