"""What a terminal shows of a comparison: its table, what its marks mean, findings, and where to read on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, SPEED
from harness.judge.findings.finding import statements
from harness.judge.statistics import LEVEL
from harness.tell import tables
from harness.tell.document import Column, Table
from harness.tell.formats import fitted, line_width, percent
from harness.tell.sections.job import TITLE_SETTINGS

PEAK = "peak_bytes"
SHOWN = ("job_id", "backend", "world_size", "status", SPEED, "speed_ratio", PEAK, SENT, "parity")
"""Columns without --wide."""


def terminal_text(comparison: Comparison, *, wide: bool = False) -> str:
    """The table and what the findings say."""
    return "\n".join([terminal_table(comparison, wide=wide), *finding_lines(comparison, wide=wide)])


def terminal_table(comparison: Comparison, *, wide: bool = False) -> str:
    """The main table and a line that explains what stands in it; `wide`: all of its columns."""
    table = tables.results_table(comparison.comparable).for_people()
    if wide:
        shown = tables.main_table(comparison)
    else:
        shown = _narrow(table, SHOWN)
        excluded = tables.not_comparable_table(comparison)
        if excluded is not None:
            shown += f"\n\n{tables.NOT_COMPARABLE}\n{_narrow(excluded.for_people())}"
    rows = table.texts()
    more = [] if wide else ["--wide: all columns"]
    marks = [*_legend(table, rows), tables.at_once_meaning(comparison.comparable.groups)]
    found = "; ".join([*filter(None, marks), *more])
    return "\n".join([shown, *(textwrap.wrap(found, line_width()) if rows else [])])


def _legend(table: Table, rows: list[list[str]]) -> Iterator[str]:
    """What marks and parity levels of a table mean, only those that it has."""
    keys = [column.key for column in table.columns]
    place = keys.index("speed_ratio")
    if any(" (" in row[place] for row in rows):
        yield f"{table.columns[place].title}: in the same round, {percent(LEVEL)} interval"
    if any(row[place].startswith(tables.OPEN) for row in rows):
        yield f"{tables.OPEN}: order open, see --repeats"
    if any(text.partition(" ")[0].endswith(tables.WITHOUT_FORM) for row in rows for text in row):
        yield f"{tables.WITHOUT_FORM}: {tables.WITHOUT_FORM_MEANS}"
    parities = {row[keys.index("parity")].removesuffix(tables.AT_ONCE) for row in rows}
    yield from (f"{level}: {of['short']}" for level, of in tables.PARITY_WORDS.items() if level in parities)


def _narrow(table: Table, keys: tuple[str, ...] | None = None) -> str:
    places = [n for n, column in enumerate(table.columns) if keys is None or column.key in keys]
    columns = [table.columns[n] for n in places]

    def brief(column: Column, text: str) -> str:
        return text.partition(" (")[0] if column.key == PEAK else text  # without the spread

    titles = [brief(column, column.title) for column in columns]
    alignments = {title: column.align for title, column in zip(titles, columns, strict=True)}
    rows = [[brief(table.columns[n], row[n]) for n in places] for row in table.texts()]
    return fitted(rows, titles, alignments=alignments)


def finding_lines(comparison: Comparison, *, wide: bool = False) -> list[str]:
    """One line for what each kind of finding says, causes first; wrapped at the width unless `wide`."""
    lines = [f"finding {statement.id}: {statement.sentence}" for statement in statements(comparison.findings)]
    return lines if wide else [_wrapped(line) for line in lines]


def _wrapped(line: str) -> str:
    return line if len(line) <= line_width() else textwrap.fill(line, line_width(), subsequent_indent="  ")


def where_to_read(comparison: Comparison) -> list[str]:
    """For the person who watches: where findings are explained, and which settings differ."""
    lines = []
    if comparison.findings:
        lines.append("`harness explain ID` shows cause and fix of a finding")
    named = {
        words: ", ".join(dict.fromkeys(one.setting for one in comparison.settings if one.effect == effect))
        for effect, words in (("mathematics", "change the mathematics"), ("cost", "cost only"))
    }
    if any(named.values()):
        said = "; ".join(f"{words}: {names}" for words, names in named.items() if names)
        lines.append(
            _wrapped(f"settings that differ; {said} (values: --json, or '{TITLE_SETTINGS}' in a report)")
        )
    return lines
