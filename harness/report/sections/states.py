"""Model states: measured, expected in closed form, and as the textbook counts them."""

from __future__ import annotations

from typing import Any

from harness.forms.terms import STATE_KINDS
from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats
from harness.judge.states import largest, rank_states, textbook
from harness.report.document import Block, Column, Folded, Paragraph, Section, Table, plain
from harness.report.formats import megabytes
from harness.report.tables import LABELS

TEXT = (
    "Of the first repeat, after a backward pass, on the rank that holds most of them. expected: the closed "
    "form of this library's "
    "own layout, from its source, with padding and copies; off: measured minus expected in bytes. textbook: "
    "the ZeRO paper with Adam (arXiv 1910.02054): 2 + 2 + 12 bytes per parameter at mixed precision, "
    "4 + 4 + 8 in fp32, divided by the ranks that share what the strategy shards."
)
COLUMNS = (
    *LABELS,
    Column("kind", "kind", align="left"),
    Column("measured_bytes", "measured MB", megabytes),
    Column("expected_bytes", "expected MB", megabytes),
    Column("off_bytes", "off, bytes", plain),
    Column("textbook_bytes", "textbook MB", megabytes),
)
KIND = [column.key for column in COLUMNS].index("kind")
ALL = "all"
"""The kind of the line that sums up the others."""
TERM_COLUMNS = (
    *LABELS,
    Column("kind", "kind", align="left"),
    Column("term", "term", align="left"),
    Column("bytes", "bytes", plain),
    Column("where", "where", align="left"),
)


def states_section(comparison: Comparison) -> Section | None:
    """A table of kinds and one of terms; None where no model states were measured."""
    kinds: list[list[Any]] = []
    terms: list[list[Any]] = []
    for group in comparison.groups:
        kinds += _kinds(group)
        terms += _terms(group)
    if not kinds:
        return None
    totals = [[*line[:KIND], *line[KIND + 1 :]] for line in kinds if line[KIND] == ALL]
    table = Table(key="model_state_totals", columns=[*COLUMNS[:KIND], *COLUMNS[KIND + 1 :]], rows=totals)
    by_kind = Table(key="model_states", columns=COLUMNS, rows=[line for line in kinds if line[KIND] != ALL])
    by_term = Table(key="model_state_terms", columns=TERM_COLUMNS, rows=terms)
    blocks: list[Block] = [
        Paragraph(TEXT),
        table,
        Folded("Weights, gradients, masters and optimizer states separately", [by_kind]),
        *([Folded("Terms of the closed forms", [by_term])] if terms else []),
    ]
    return Section("model_states", "Model states: measured, expected, textbook", blocks)


def _kinds(group: Repeats) -> list[list[Any]]:
    held = largest(rank_states(group.record))
    if held is None:
        return []
    expected = held.expected.kinds() if held.expected else None
    book = textbook(group.record)
    lines = []
    for kind in STATE_KINDS:
        measured = held.measured.get(kind, 0)
        form = expected.get(kind, 0) if expected is not None else None
        counted = book[kind] if book is not None else None
        if measured or form or counted:
            off = None if form is None else measured - form
            lines.append([*group.cell, kind, measured, form, off, counted])
    total = held.expected.model_state_bytes if held.expected else None
    off = None if total is None else held.measured_bytes - total
    by_the_book = sum(book.values()) if book is not None else None
    return [*lines, [*group.cell, ALL, held.measured_bytes, total, off, by_the_book]]


def _terms(group: Repeats) -> list[list[Any]]:
    held = largest(rank_states(group.record))
    if held is None or held.expected is None:
        return []
    return [
        [*group.cell, term.kind, term.name, term.bytes, "host" if term.host else "device"]
        for term in held.expected.terms
    ] + [[*group.cell, term.kind, term.name, term.bytes, "files"] for term in held.expected.files]
