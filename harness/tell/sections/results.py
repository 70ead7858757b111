"""The main table, the cells without a result, and differences from the textbook or from defaults."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.cell import CellName, name_cells
from harness.judge.comparison import Comparison
from harness.judge.library_notes.rules import library_notes
from harness.judge.quantities.expected import unjudged_amounts
from harness.judge.repeats import CellRuns, job_marks
from harness.judge.rows import reason
from harness.judge.run_conditions import PAUSE_SECONDS
from harness.judge.wording import counted, listed
from harness.record import Record
from harness.tell.document import Block, Folded, Items, Paragraph, Section, Table
from harness.tell.order_words import LEGEND, clock_words, sessions_words
from harness.tell.pictures.trade_off import throughput_picture, trade_off_picture
from harness.tell.tables import (
    WITHOUT_FORM,
    WITHOUT_FORM_MEANS,
    prose,
    results_table,
    spread_table,
    table_columns,
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
        text = (
            f"speed: {LEGEND}. n/a for the reference, for a cell without another to compare with, and for "
            f"one that diverged, since it did other work. {clock_words(comparison)}"
        )
        sessions = (
            f"Runs are from {sessions_words(comparison.sessions)}. A pause of more than "
            f"{PAUSE_SECONDS / 3600:g} h between two runs, or another host, begins a session. within one "
            "and between them: largest less smallest mean timed step of the runs of a session, and of the "
            "medians of sessions, relative to the median."
        )
        title = f"Repeats and spread: {counted(runs, 'run')} of each cell at most"
        blocks += [Paragraph(text.rstrip()), Folded(title, [spread, Paragraph(sessions)])]
    pictures = (throughput_picture(comparison), trade_off_picture(comparison))
    blocks += [picture for picture in pictures if picture is not None]
    return Section("results", "Results", blocks)


Alike = tuple[str, int, int, str, str | None]
"""Mark of the job, failed runs and all runs of a cell, status, reason without the rank that failed."""


def failures_section(comparison: Comparison) -> Section:
    """Each reason with its cells and their number of runs, or that no cell failed."""
    groups = comparison.groups
    marks = job_marks(groups)
    found: dict[Alike, list[tuple[CellName, Record]]] = {}
    for group in groups:
        for failed in _by_error(group):
            first = failed[0]
            why = reason(first, with_rank=False)
            alike = marks[first.job_id], len(failed), len(group.rows), first.status, why
            found.setdefault(alike, []).append((group.cell, first))
    lines = [_line(alike, cells) for alike, cells in found.items()]
    block = Items(lines) if lines else Paragraph("None: no cell failed, ran out of memory or is unsupported.")
    return Section("failures", "Failed and unsupported cells", [block])


def _line(alike: Alike, cells: Sequence[tuple[CellName, Record]]) -> str:
    """Cells of one job that failed alike; names the rank if it is the same one everywhere."""
    job, failed, runs, status, why = alike
    reasons = {reason(record) for _, record in cells}
    count = f", {failed} of {runs} runs{' of each' if len(cells) > 1 else ''}" if runs > 1 else ""
    shown = reasons.pop() if len(reasons) == 1 else why
    return f"{name_cells([cell for cell, _ in cells])}{job}{count}: {status}: {shown}"


def _by_error(group: CellRuns) -> list[list[Record]]:
    """The failed runs of a cell, one list for each status and kind of error."""
    kinds: dict[tuple[str, str], list[Record]] = {}
    for row in group.rows:
        record = row.record
        if (why := reason(record)) is not None:
            kind = record.error.kind if record.error else why
            kinds.setdefault((record.status, kind), []).append(record)
    return list(kinds.values())


KEY = "surprises_all"
TITLE = "Differences: from the textbook and from defaults"


def surprises_all_section(comparison: Comparison) -> Section | None:
    """One line each, largest effect first; None where there are none."""
    rows = [
        [
            name_cells(note.cells), note.what, note.origin, note.library_note.advice,
            note.library_note.since, note.library_note.id, note.figure,
        ]
        for note in library_notes(comparison)
    ]  # fmt: skip
    if not rows:
        return None
    table = Table(key="surprises", columns=table_columns("surprises"), rows=rows)
    return Section(KEY, TITLE, [Paragraph(prose("surprises")), table])
