"""Memory of a rank after the backward pass, stacked by kind, beside its peak and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compare.repeats import Repeats, group_repeats
from harness.compare.rows import Row
from harness.report.document import Picture
from harness.report.drawing import COLOURS, GREY
from harness.report.pictures.bars import caption, drawable, height_inches, label_bars, legend_below, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (
    "weights", "gradients", "masters", "optimizer", "gathered", "activations", "communication", "buffers",
    "data", "other",
)  # fmt: skip


def memory_picture(rows: Sequence[Row]) -> Picture | None:
    """None where no kinds were measured."""
    known = [group for group in group_repeats(rows) if _kinds(group)]
    drawn = drawable(known)
    if not drawn:
        return None
    text = (
        "Live bytes by kind after the backward pass on the rank that holds most (bars), the largest peak of "
        "a step (lines), and model states, which are weights, gradients, masters and optimizer, as "
        "expected in closed form (diamonds)."
    )
    return Picture(
        key="memory",
        caption=caption(text, drawn, known),
        draw=lambda figure: _draw(figure, drawn),
        height_inches=height_inches(len(drawn)),
    )


def _draw(figure: Figure, groups: Sequence[Repeats]) -> None:
    axis = stacked(figure, groups, [_kinds(group) for group in groups], KINDS)
    peaks = [(max(g.rank_peaks) / 1e6, place) for place, g in enumerate(groups) if g.rank_peaks]
    expected = [
        (value / 1e6, place)
        for place, group in enumerate(groups)
        if (value := group.median("expected_model_state_bytes")) is not None
    ]
    for points, name, marker, colour, size in (
        (peaks, "peak", "|", GREY, 200),
        (expected, "expected model states", "D", COLOURS[5], 22),
    ):
        if points:
            across, places = zip(*points, strict=True)
            axis.scatter(
                across, places, marker=marker, color=colour, s=size, label=name, zorder=3, linewidths=2
            )
    label_bars(axis, groups, "memory of a rank (MB)")
    legend_below(figure)


def _kinds(group: Repeats) -> dict[str, float]:
    """MB by kind in the last counted step, those that are nowhere left out."""
    moments = []
    for rank in group.record.ranks:
        of_rank = [m.kinds for m in rank.memory if m.moment == "after_backward" and m.kinds]
        moments += of_rank[-1:]
    if not moments:
        return {}
    largest = max(moments, key=lambda held: sum(held.values()))
    return {kind: largest[kind] / 1e6 for kind in KINDS if largest.get(kind)}
