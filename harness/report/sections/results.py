"""The main table, and how far repeats spread."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.expected import unjudged_amounts
from harness.judge.occasions import PAUSE_SECONDS
from harness.judge.order_words import occasions_words, runs_needed_words
from harness.judge.statistics import LEVEL
from harness.judge.wording import counted, listed
from harness.report.document import Block, Folded, Paragraph, Section
from harness.report.formats import percent
from harness.report.pictures.throughput import throughput_picture
from harness.report.pictures.trade_off import trade_off_picture
from harness.report.tables import (
    NOT_JUDGED,
    WITHIN_NOISE,
    WITHOUT_FORM,
    WITHOUT_FORM_MEANS,
    results_table,
    spread_table,
)


def results_without_speeds(comparison: Comparison) -> Section:
    """One line per job, backend and world size, of figures that no load of the machine changes."""
    blocks = [results_table(comparison, speeds=False), *_without_form(comparison)]
    return Section("results", "Results", blocks)


def _without_form(comparison: Comparison) -> list[Block]:
    """What the mark of cells means whose bytes and memory no closed form judges; nothing if none has it."""
    labels = dict.fromkeys(group.label for group in comparison.groups if unjudged_amounts(group.record))
    if not labels:
        return []
    return [Paragraph(f"{WITHOUT_FORM}: {WITHOUT_FORM_MEANS} ({listed(list(labels))}).")]


def results_section(comparison: Comparison) -> Section:
    """One line per job, backend and world size; the spread is folded."""
    blocks: list[Block] = [results_table(comparison), *_without_form(comparison)]
    spread = spread_table(comparison)
    if spread is not None:
        runs = max(len(group.rows) for group in comparison.groups)
        needed = runs_needed_words(comparison.rankings)
        text = (
            "of highest: median throughput relative to the highest of the same job and number of ranks; n/a "
            "for the reference, for a cell without another to compare with, and for one that diverged, since "
            f"it did other work. {WITHIN_NOISE}: tied with it at {percent(LEVEL)} for all cells together. "
            f"{NOT_JUDGED}: too few runs to test a difference against noise"
            f"{f', which takes {needed}' if needed else ''}."
        )
        occasions = (
            f"Runs stem from {occasions_words(comparison.occasions)}. A pause of more than "
            f"{PAUSE_SECONDS / 3600:g} h between two runs, or another host, begins an occasion. within one "
            "and between them: largest less smallest mean timed step of the runs of an occasion, and of the "
            "medians of occasions, relative to the median."
        )
        title = f"Repeats and spread: {counted(runs, 'run')} of each cell at most"
        blocks += [Paragraph(text), Folded(title, [spread, Paragraph(occasions)])]
    pictures = (throughput_picture(comparison), trade_off_picture(comparison))
    blocks += [picture for picture in pictures if picture is not None]
    return Section("results", "Results", blocks)
