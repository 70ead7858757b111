"""Peak memory of a rank: model states by kind and the rest, with what is expected and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.forms.terms import STATE_KINDS
from harness.judge.comparison import Comparison
from harness.judge.quantities import measures
from harness.judge.quantities.model_states import largest, rank_states
from harness.judge.repeats import CellRuns
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.pictures.bars import (
    bar_chart,
    caption,
    cell_row,
    cut_at,
    drawable,
    quantity,
    rows_of_all,
    stack,
    text_after,
    tick,
    told,
)
from harness.tell.pictures.drawing import KINDS, Row, layer, only_drawn

REST = "activations"
LABELS = {**{kind: kind for kind in STATE_KINDS}, REST: "rest of the peak"}
FARTHEST_LIMIT = 4.0
"""Times the largest peak; a limit beyond it is told, since its line would make the bars short."""
TITLE = "peak memory of a rank, MB"


def memory_picture(comparison: Comparison) -> Picture | None:
    """None where no peak was measured."""
    known = [group for group in comparison.groups if group.rank_peaks]
    drawn = drawable(known)
    if not drawn:
        return None
    cells = [_Bar(group) for group in drawn]
    limit = min((cell.limit for cell in cells if cell.limit is not None), default=None)
    near = limit is not None and limit <= FARTHEST_LIMIT * max(cell.peak for cell in cells)
    cut = cut_at([cell.peak for cell in cells])
    every = rows_of_all(known, drawn, lambda group: _Bar(group).rows(known, near, cut))
    rows = only_drawn(every)
    ends = [row for row in rows if row["kind"] == LABELS[REST]]
    text = (
        "Peak memory of the rank that needs most. Coloured: model states after the backward pass; grey: "
        "activations, gathered weights, buffers and other parts of the peak."
    )
    if any(row["expected"] is not None for row in ends):
        text += " Vertical marks: model states expected in closed form."
    if limit is not None:
        text += f" Device limit: {number(limit)} MB."
    if cut is not None:
        text += f" Bars are cut at {number(cut)} MB."
    return Picture(
        key="memory",
        caption=caption(text, drawn, known),
        alt=f"Bars: {TITLE}, and model states. {told(ends)}.",
        chart=lambda: _chart(every, limit if near else None),
    )


class _Bar:
    """Figures of one bar, in MB."""

    def __init__(self, group: CellRuns) -> None:
        record = group.record
        kinds = measures.kinds_at(record, "after_backward")
        self.group = group
        self.states = {kind: kinds[kind] / 1e6 for kind in STATE_KINDS if kinds.get(kind)}
        self.peak = max(group.rank_peaks) / 1e6
        self.expected = _expected(group)
        limit = record.world.memory_limit_bytes or (
            record.prediction.device_limit_bytes if record.prediction else None
        )
        self.limit = None if limit is None else limit / 1e6

    def rows(self, groups: Sequence[CellRuns], near: bool, cut: float | None) -> list[Row]:
        """One for each kind; the last, which is always there, holds what belongs to the cell."""
        held = sum(self.states.values())
        is_cut = cut is not None and self.peak > cut
        end = cut if cut is not None and is_cut else self.peak
        parts = {**self.states, REST: max(0.0, end - held)}
        of_cell = {
            "peak": self.peak,
            "end": end,
            "expected": self.expected,
            "limit": self.limit if near else None,
            "text": f"{number(self.peak)} MB"
            + (f", states {number(held)}" if self.states else "")
            + (" (bar cut)" if is_cut else ""),
        }
        return [
            cell_row(
                self.group, groups, kind=LABELS[kind], megabytes=size, order=list(KINDS).index(kind),
                **(of_cell if kind == REST else dict.fromkeys(of_cell)),
            )
            for kind, size in parts.items()
        ]  # fmt: skip


def _expected(group: CellRuns) -> float | None:
    """Closed form of the model states on the device, of the rank that holds most."""
    states = largest(rank_states(group.record))
    if states is None or states.expected is None:
        return None
    kinds = states.expected.kinds(host=False)
    return sum(kinds.get(kind, 0) for kind in STATE_KINDS) / 1e6


def _chart(rows: Sequence[Row], limit: float | None) -> dict[str, Any]:
    used = {row["kind"] for row in rows}
    colours = {LABELS[kind]: colour for kind, colour in KINDS.items() if LABELS[kind] in used}
    layers = [stack("megabytes", TITLE, "kind", colours), tick("expected"), text_after("end")]
    if limit is not None:
        at = {**quantity("limit"), "aggregate": "min"}
        layers += layer("device_limit", x=at, text=f"device limit {number(limit)} MB")
    return bar_chart(rows, layers)
