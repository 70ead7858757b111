"""What the short report holds, in its order; every line refers to the details that show its evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from harness.judge.comparison import Comparison
from harness.judge.scaling import strong_scaling, weak_scaling
from harness.report.cells import report_cells
from harness.report.document import Block, Document, Folded, Picture, Section
from harness.report.pictures.loss import loss_picture
from harness.report.pictures.memory import memory_picture
from harness.report.pictures.scaling import strong_picture, weak_picture
from harness.report.pictures.throughput import throughput_picture
from harness.report.pictures.volume import volume_picture
from harness.report.short.check import check_section
from harness.report.short.choice import choice_section
from harness.report.short.scope import scope_section
from harness.report.short.summary import MOST_ROWS, summary_section
from harness.report.short.surprises import surprises_section
from harness.report.short.title import title
from harness.report.short.verdict import verdict_section
from harness.report.short.warnings import warnings_section
from harness.report.writers.markdown import render_markdown
from harness.spec import Question

SECTIONS: tuple[Callable[[Comparison, Question], Section | None], ...] = (
    scope_section,
    verdict_section,
    summary_section,
    choice_section,
    surprises_section,
    warnings_section,
    check_section,
)
MOST_WORDS = 1200
"""Of the short report as markdown, whatever the number of cells."""
ROWS = range(MOST_ROWS, 3, -1)
"""Of the results, at most: the largest number with which the report is short enough."""
MOST_PICTURES = 4


PICTURES: dict[Question, tuple[Callable[[Comparison], Picture | None], ...]] = {
    "all": (throughput_picture, memory_picture, volume_picture, loss_picture),
    "speed": (throughput_picture, volume_picture, memory_picture),
    "memory": (memory_picture,),
    "footprint": (memory_picture, volume_picture),
    "parity": (loss_picture,),
    "scaling": (lambda c: strong_picture(strong_scaling(c)), lambda c: weak_picture(weak_scaling(c))),
}
"""At most `MOST_PICTURES` each; they follow the results and are not repeated in the details."""


def short_document(
    comparison: Comparison, question: Question, details: Document, *, subject: str = ""
) -> Document:
    """The short report that answers `question`, in front of its details.

    As many rows of the results as `MOST_WORDS` leave room for.
    """
    made = {make: make(comparison, question) for make in SECTIONS}
    pictures = [p for make in PICTURES[question] if (p := make(comparison.comparable)) is not None]
    shown = {picture.key for picture in pictures}
    without = [replace(section, blocks=_without(section.blocks, shown)) for section in details.sections]
    rest = [section for section in without if section.blocks]
    whole = Document(
        title(comparison, question, subject), [], replace(details, sections=rest), report_cells(comparison)
    )
    for most_rows in ROWS:
        results = summary_section(comparison, question, most_rows)
        if results is not None:
            made[summary_section] = replace(results, blocks=[*results.blocks, *pictures])
        whole = replace(whole, sections=[section for section in made.values() if section is not None])
        if words_of(whole) <= MOST_WORDS:
            break
    return whole


def words_of(document: Document) -> int:
    """Words of the short report as markdown, the marks of tables and alternative texts included."""
    pictures = {picture.key: picture.key for picture in document.pictures()}
    return len(render_markdown(document, pictures, "", "report.details.md").split())


def _without(blocks: Sequence[Block], keys: Collection[str]) -> list[Block]:
    """The blocks without the pictures of these keys."""
    return [
        replace(block, blocks=_without(block.blocks, keys)) if isinstance(block, Folded) else block
        for block in blocks
        if not (isinstance(block, Picture) and block.key in keys)
    ]
