"""What a terminal shows of a comparison: its table, what its marks mean, findings, and where to read on."""

from __future__ import annotations

import textwrap

from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, SPEED
from harness.judge.findings.finding import statements
from harness.tell import tables
from harness.tell.document import Column, Table
from harness.tell.formats import fitted, line_width
from harness.tell.sections.job import TITLE_SETTINGS

PEAK = "peak_bytes"
SHOWN = ("job_id", "backend", "world_size", "status", SPEED, "speed_ratio", PEAK, SENT, "parity")
"""Columns without --wide."""


def terminal_text(comparison: Comparison, *, wide: bool = False) -> str:
    """The table and what the findings say."""
    return "\n".join([terminal_table(comparison, wide=wide), *finding_lines(comparison, wide=wide)])


def terminal_table(comparison: Comparison, *, wide: bool = False) -> str:
    """The main table, what does not belong in it, and what marks mean; `wide`: all columns."""
    table = tables.results_table(comparison.comparable)
    excluded = tables.not_comparable_table(comparison)
    parts = [_text(table, wide, SHOWN)]
    parts += ["", tables.NOT_COMPARABLE, _text(excluded, wide)] if excluded is not None else []
    if table.rows:
        notes = tables.legend([table], comparison.comparable.groups, terminal=True)
        parts += textwrap.wrap(" ".join([*notes, *([] if wide else ["--wide: all columns."])]), line_width())
    return "\n".join(parts)


def _text(whole: Table, wide: bool, keys: tuple[str, ...] | None = None) -> str:
    table = whole.for_people()
    places = [n for n, column in enumerate(table.columns) if wide or keys is None or column.key in keys]
    columns = [table.columns[n] for n in places]

    def brief(column: Column, text: str) -> str:
        return text.partition(" (")[0] if column.key == PEAK and not wide else text  # without the spread

    titles = [brief(column, column.title) for column in columns]
    alignments = {title: column.align for title, column in zip(titles, columns, strict=True)}
    rows = [[brief(table.columns[n], row[n]) for n in places] for row in table.texts()]
    return fitted(rows, titles, alignments=alignments, wide=wide)


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
    changing = dict.fromkeys(one.setting for one in comparison.settings if one.effect == "mathematics")
    if changing:
        said = f"settings that differ and may change the training: {', '.join(changing)}"
        lines.append(_wrapped(f"{said} (values: --json, or '{TITLE_SETTINGS}' in a report)"))
    return lines
