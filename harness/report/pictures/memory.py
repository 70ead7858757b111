"""Memory of a rank after the backward pass, stacked by kind, beside its peak and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.compare import measures
from harness.compare.repeats import Repeats, group_repeats
from harness.compare.rows import Row
from harness.report.document import Picture
from harness.report.drawing import GREY
from harness.report.pictures.bars import caption, drawable, height_inches, label_bars, legend_below, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (
    "weights", "gradients", "masters", "optimizer", "gathered", "activations", "communication", "buffers",
    "data", "other",
)  # fmt: skip
"""Model states first: a bar's first four end where the expected ones do."""


def memory_picture(rows: Sequence[Row]) -> Picture | None:
    """None where no kinds were measured."""
    known = [group for group in group_repeats(rows) if _kinds(group)]
    drawn = drawable(known)
    if not drawn:
        return None
    text = (
        "Live bytes by kind after the backward pass, on the rank that then holds most (bars), the largest "
        "peak of a whole step (lines), and the model states expected in closed form at the same moment "
        "(diamonds): weights, gradients, masters and optimizer together, the first parts of a bar."
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
    peak: dict[str, Any] = {"marker": "|", "color": GREY, "s": 200}
    diamond: dict[str, Any] = {"marker": "D", "facecolors": "white", "edgecolors": "black", "s": 22}
    for points, name, style in (
        (peaks, "peak", peak), (expected, "expected model states", diamond),
    ):  # fmt: skip
        if points:
            across, places = zip(*points, strict=True)
            axis.scatter(across, places, label=name, zorder=3, linewidths=1.5, **style)
    label_bars(axis, groups, "memory of a rank (MB)")
    legend_below(figure)


def _kinds(group: Repeats) -> dict[str, float]:
    """MB by kind after the backward pass of the last counted step, those that are nowhere left out."""
    kinds = measures.kinds_at(group.record, "after_backward")
    return {kind: kinds[kind] / 1e6 for kind in KINDS if kinds.get(kind)}
