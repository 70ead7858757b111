"""Bytes that a rank sends per step: measured, expected and by the textbook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compare.comparison import Comparison
from harness.compare.metrics import BY_KEY, EXPECTED_SENT, SENT, TEXTBOOK_SENT
from harness.compare.repeats import Repeats
from harness.report.document import Picture
from harness.report.drawing import COLOURS
from harness.report.figures import axis_label
from harness.report.pictures.bars import caption, drawable, height_inches, label_bars, legend_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def volume_picture(comparison: Comparison) -> Picture | None:
    """None where nobody sent anything."""
    known = [group for group in comparison.groups if group.median(SENT)]
    drawn = drawable(known)
    if not drawn:
        return None
    text = (
        "Bytes that a rank sends per step (ring algorithm). Bars: measured. Diamonds: expected of this "
        "implementation. Lines: the textbook's closed form."
    )
    return Picture(
        key="communication",
        caption=caption(text, drawn, known),
        draw=lambda figure: _draw(figure, drawn),
        height_inches=height_inches(len(drawn)),
    )


def _draw(figure: Figure, groups: Sequence[Repeats]) -> None:
    axis = figure.subplots()
    measured = [(group.median(SENT) or 0.0) / 1e6 for group in groups]
    axis.barh(range(len(groups)), measured, height=0.72, color=COLOURS[4], label="measured")
    for key, marker, colour, size in (
        (EXPECTED_SENT, "D", COLOURS[5], 22),
        (TEXTBOOK_SENT, "|", COLOURS[0], 200),
    ):
        points = [
            (value / 1e6, place)
            for place, group in enumerate(groups)
            if (value := group.median(key)) is not None
        ]
        if points:
            across, places = zip(*points, strict=True)
            axis.scatter(
                across,
                places,
                marker=marker,
                color=colour,
                s=size,
                label=BY_KEY[key].title,
                zorder=3,
                linewidths=2,
            )
    label_bars(axis, groups, axis_label(SENT))
    legend_below(figure)
