"""Bytes that a rank sends per step: measured, expected and by the textbook."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.comparison import Comparison
from harness.judge.metrics import EXPECTED_SENT, SENT, TEXTBOOK_SENT
from harness.judge.repeats import CellRuns
from harness.tell.document import Picture
from harness.tell.formats import number, short
from harness.tell.pictures.bars import (
    bar,
    bar_chart,
    caption,
    cell_row,
    drawable,
    rows_of_all,
    text_after,
    tick,
    told,
)
from harness.tell.pictures.drawing import LIMIT, Row, only_drawn

NEGLIGIBLE = 0.005
"""Relative difference below which two volumes are written as equal."""


def volume_picture(comparison: Comparison) -> Picture | None:
    """None where nobody sent anything."""
    known = [group for group in comparison.groups if group.median(SENT)]
    drawn = drawable(known)
    if not drawn:
        return None
    every = rows_of_all(known, drawn, lambda group: [_row(group, known)])
    rows = only_drawn(every)
    title = "sent by a rank per step, MB (ring algorithm)"
    layers = [bar("megabytes", title), tick("textbook"), tick("unexpected", colour=LIMIT), text_after("end")]
    return Picture(
        key="communication",
        caption=caption(f"Bytes that a rank sends per step. {_ticks(rows)}", drawn, known),
        alt=f"Bars: {title}. {told(rows)}.",
        chart=lambda: bar_chart(every, layers),
    )


def _row(group: CellRuns, groups: Sequence[CellRuns]) -> Row:
    sent = group.median(SENT) or 0.0
    textbook, expected = group.median(TEXTBOOK_SENT), group.median(EXPECTED_SENT)
    text = f"{number(sent / 1e6)} MB"
    if textbook and not _equal(sent, textbook):
        text += f" = {short(round(sent / textbook, 2))} x textbook"
    unexpected = expected is not None and not _equal(sent, expected)
    if expected is not None and unexpected:
        text += f", {number(expected / 1e6)} expected"
    known = [value for value in (sent, textbook, expected) if value is not None]
    return cell_row(
        group, groups, megabytes=sent / 1e6, text=text, end=max(known) / 1e6,
        textbook=None if textbook is None else textbook / 1e6,
        expected=None if expected is None else expected / 1e6,
        unexpected=expected / 1e6 if expected is not None and unexpected else None,
    )  # fmt: skip


def _ticks(rows: Sequence[Row]) -> str:
    text = "Vertical marks: the textbook (ZeRO paper)."
    judged = [row for row in rows if row["expected"] is not None]
    if any(row["unexpected"] is not None for row in rows):
        return f"{text} Red: bytes expected of the implementation, where it sent others."
    if not judged:
        return text
    if len(judged) < len(rows):
        return f"{text} {len(judged)} of {len(rows)} cells have an expected volume, and sent it."
    return f"{text} Every cell sent the bytes expected of its implementation."


def _equal(value: float, other: float) -> bool:
    return abs(value - other) <= NEGLIGIBLE * abs(other)
