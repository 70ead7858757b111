"""Memory against throughput, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compare.comparison import Comparison
from harness.compare.metrics import SPEED
from harness.compare.order_words import unranked_words
from harness.compare.ranking import Ranking, frontier
from harness.compare.repeats import Repeats, place_to_compare, rank_speeds
from harness.compare.wording import listed, ranks
from harness.report.document import Picture
from harness.report.drawing import COLOURS, GREY, MARKERS
from harness.report.figures import axis_label
from harness.report.formats import shortened
from harness.report.pictures.bars import LONGEST_LABEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]
AXIS_POINTS = (430.0, 240.0)
"""About what the extent of the points is on paper, where a letter of a label is 4 by 7 points."""
SHIFTS = ((5, 4), (5, -10), (-14, 4), (-14, -10), (5, 14), (5, -20), (-14, 14), (-14, -20))


def trade_off_picture(comparison: Comparison) -> Picture | None:
    """Each backend where the verdict compares them; None below two of them.

    What left its reference does other work and is not shown.
    """
    known = [
        group
        for group in comparison.groups
        if group.succeeded and group.parity != "diverged" and group.rank_peaks and group.values(SPEED)
    ]
    place = place_to_compare(known)
    groups = [group for group in known if group.place == place]
    if place is None or len(groups) < 2:
        return None
    order = rank_speeds(groups)
    peaks = {group.label: float(max(group.rank_peaks)) for group in groups}
    best = frontier(peaks, order)
    line = [group for name in best for group in groups if group.label == name]
    return Picture(
        key="trade-off",
        caption=(
            f"Peak memory against throughput on {ranks(place[1])}, medians. {_frontier_words(best, order)} "
            "Numbers are those of the legend, by median throughput."
        ),
        draw=lambda figure: _draw(figure, groups, line),
        height_inches=4.2 + 0.17 * ((len(groups) + 2) // 3),
    )


def _frontier_words(best: Sequence[str], order: Ranking) -> str:
    if not order.is_judged:
        return f"No frontier is drawn: {unranked_words(order)}."
    if len(best) == 1:
        return f"No cell that needs more memory than {best[0]} is faster beyond noise."
    return f"The line is the Pareto frontier, each step faster beyond noise: {listed(best, len(best))}."


def _point(group: Repeats) -> Point:
    return max(group.rank_peaks) / 1e6, group.median(SPEED) or 0.0


def _draw(figure: Figure, groups: Sequence[Repeats], best: Sequence[Repeats]) -> None:
    axis = figure.subplots()
    points = [_point(group) for group in groups]
    if len(best) > 1:
        line = [_point(group) for group in best]
        axis.step(*zip(*line, strict=True), where="post", color=GREY, linewidth=1, linestyle="--", zorder=1)
    order = sorted(range(len(groups)), key=lambda index: -points[index][1])
    for number, index in enumerate(order, start=1):
        x, y = points[index]
        axis.scatter(
            [x], [y], color=COLOURS[(number - 1) % len(COLOURS)], zorder=2,
            marker=MARKERS[(number - 1) // len(COLOURS) % len(MARKERS)], s=42,
            label=f"{number} {shortened(groups[index].label, LONGEST_LABEL)}",
        )  # fmt: skip
    spans = axis_spans(points)
    labels = [(place, ", ".join(map(str, of))) for place, of in _together(points, order, spans).items()]
    scaled = [((x / spans[0] * AXIS_POINTS[0], y / spans[1] * AXIS_POINTS[1]), t) for (x, y), t in labels]
    for ((x, y), text), shift in zip(labels, label_shifts(scaled), strict=True):
        axis.annotate(text, (x, y), xytext=shift, textcoords="offset points", fontsize=7)
    axis.set_xlabel(axis_label("peak_bytes"))
    axis.set_ylabel(axis_label(SPEED))
    axis.set_ylim(0, 1.08 * max(rate for _, rate in points))
    axis.margins(x=0.08)
    axis.grid()
    figure.legend(loc="outside lower center", ncols=3)


def axis_spans(points: Sequence[Point]) -> Point:
    """Extent in both directions, never zero."""
    across, up = zip(*points, strict=True)
    return (max(across) - min(across)) or 1.0, max(up) or 1.0


def label_shifts(labels: Sequence[tuple[Point, str]]) -> list[Point]:
    """Offset of each label from its point: the first shift at which it covers no other."""
    taken: list[tuple[Point, int]] = []
    shifts: list[Point] = []

    def free(x: float, y: float, letters: int) -> bool:
        return all(
            x + 4 * letters <= left or left + 4 * others <= x or abs(y - low) >= 8
            for (left, low), others in taken
        )

    for (x, y), text in labels:
        dx, dy = next(((dx, dy) for dx, dy in SHIFTS if free(x + dx, y + dy, len(text))), SHIFTS[0])
        taken.append(((x + dx, y + dy), len(text)))
        shifts.append((dx, dy))
    return shifts


def _together(points: Sequence[Point], order: Sequence[int], spans: Point) -> dict[Point, list[int]]:
    """Numbers by the place where they are written: points that nearly coincide share one label."""
    found: dict[Point, list[int]] = {}
    for number, index in enumerate(order, start=1):
        x, y = points[index]
        near = next(
            (p for p in found if abs(p[0] - x) < 0.03 * spans[0] and abs(p[1] - y) < 0.045 * spans[1]), (x, y)
        )
        found.setdefault(near, []).append(number)
    return found
