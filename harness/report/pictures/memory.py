"""Memory of a rank after the forward and the backward pass, by kind, with its peak and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.compare import measures
from harness.compare.comparison import Comparison
from harness.compare.repeats import Repeats
from harness.report.document import Picture
from harness.report.drawing import GREY
from harness.report.pictures.bars import caption, drawable, label_bars, legend_below, present, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (
    "weights", "gradients", "masters", "optimizer", "gathered", "activations", "communication", "buffers",
    "data", "other",
)  # fmt: skip
"""Model states first: the first four of a bar after the backward pass end where the expected ones do."""
FULLEST, STATES = "after_forward", "after_backward"
HEIGHT = 0.36
INCHES_PER_CELL = 0.4


def memory_picture(comparison: Comparison) -> Picture | None:
    """None where no kinds were measured."""
    known = [group for group in comparison.groups if _kinds(group, FULLEST) or _kinds(group, STATES)]
    drawn = drawable(known)
    if not drawn:
        return None
    text = (
        "Live bytes by kind on the rank that holds most: upper bar after the forward pass, with all "
        "activations; lower bar after the backward pass: weights, gradients, masters and optimizer should "
        "end at the diamond, the model states expected in closed form. Lines: the largest peak within a step."
    )
    return Picture(
        key="memory",
        caption=caption(text, drawn, known),
        draw=lambda figure: _draw(figure, drawn),
        height_inches=1.5 + INCHES_PER_CELL * len(drawn),
    )


def _draw(figure: Figure, groups: Sequence[Repeats]) -> None:
    axis = figure.subplots()
    upper, lower = ([_kinds(group, moment) for group in groups] for moment in (FULLEST, STATES))
    names = present(KINDS, [*upper, *lower])
    low = [place + HEIGHT / 2 for place in range(len(groups))]
    stacked(axis, [place - HEIGHT / 2 for place in range(len(groups))], upper, names, height=HEIGHT)
    stacked(axis, low, lower, names, height=HEIGHT, legend=False)
    peaks = [(max(g.rank_peaks) / 1e6, place) for place, g in enumerate(groups) if g.rank_peaks]
    expected = [
        (value / 1e6, place)
        for place, group in zip(low, groups, strict=True)
        if (value := group.median("expected_model_state_bytes")) is not None
    ]
    peak: dict[str, Any] = {"marker": "|", "color": GREY, "s": 260}
    diamond: dict[str, Any] = {"marker": "D", "facecolors": "white", "edgecolors": "black", "s": 18}
    for points, name, style in (
        (peaks, "peak", peak), (expected, "expected model states", diamond),
    ):  # fmt: skip
        if points:
            across, places = zip(*points, strict=True)
            axis.scatter(across, places, label=name, zorder=3, linewidths=1.5, **style)
    label_bars(axis, groups, "memory of a rank (MB)")
    legend_below(figure)


def _kinds(group: Repeats, moment: str) -> dict[str, float]:
    """MB by kind at a moment of the last probed step, those that are nowhere left out."""
    kinds = measures.kinds_at(group.record, moment)
    return {kind: kinds[kind] / 1e6 for kind in KINDS if kinds.get(kind)}
