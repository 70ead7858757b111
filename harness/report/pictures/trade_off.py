"""Memory against throughput, with those that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compare.repeats import Repeats, group_repeats
from harness.compare.rows import Row
from harness.report.document import Picture
from harness.report.drawing import COLOURS, GREY, MARKERS
from harness.report.formats import listed, shortened
from harness.report.pictures.bars import LONGEST_LABEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]


def trade_off_picture(rows: Sequence[Row]) -> Picture | None:
    """Each backend at the largest world size that most were timed at; None below two of them.

    What left its reference does other work and is not shown.
    """
    known = [
        group
        for group in group_repeats(rows)
        if group.whole
        and group.parity != "diverged"
        and group.rank_peaks
        and group.values("tokens_per_second")
    ]
    if not known:
        return None
    places = [g.place for g in known]
    place = max(places, key=lambda place: (places.count(place), place[1]))
    size, groups = place[1], [g for g in known if g.place == place]
    if len(groups) < 2:
        return None
    best = pareto([_point(group) for group in groups])
    names = listed([groups[index].label for index in best], len(best))
    return Picture(
        key="trade-off",
        caption=(
            f"Peak memory against throughput on {size} ranks. The line joins those that no other beats in "
            f"both: {names}. Numbers are lines of the legend, fastest first."
        ),
        draw=lambda figure: _draw(figure, groups, best),
        height_inches=4.2 + 0.17 * ((len(groups) + 2) // 3),
    )


def pareto(points: Sequence[Point]) -> list[int]:
    """Indices of points (memory, throughput) that none beats in one without losing in the other.

    In rising memory.
    """
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def _point(group: Repeats) -> Point:
    return max(group.rank_peaks) / 1e6, group.median("tokens_per_second") or 0.0


def _draw(figure: Figure, groups: Sequence[Repeats], best: Sequence[int]) -> None:
    axis = figure.subplots()
    points = [_point(group) for group in groups]
    line = [points[index] for index in best]
    axis.step(*zip(*line, strict=True), where="post", color=GREY, linewidth=1, linestyle="--", zorder=1)
    order = sorted(range(len(groups)), key=lambda index: -points[index][1])
    for number, index in enumerate(order, start=1):
        x, y = points[index]
        axis.scatter(
            [x], [y], color=COLOURS[(number - 1) % len(COLOURS)], zorder=2,
            marker=MARKERS[(number - 1) // len(COLOURS) % len(MARKERS)], s=42,
            label=f"{number} {shortened(groups[index].label, LONGEST_LABEL)}",
        )  # fmt: skip
    for (x, y), numbers in _together(points, order, axis_spans(points)).items():
        text = ", ".join(str(number) for number in numbers)
        axis.annotate(text, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7)
    axis.set_xlabel("peak memory of a rank (MB)")
    axis.set_ylabel("throughput (tokens/s)")
    axis.set_ylim(0, 1.08 * max(rate for _, rate in points))
    axis.margins(x=0.08)
    axis.grid()
    figure.legend(loc="outside lower center", ncols=3)


def axis_spans(points: Sequence[Point]) -> Point:
    """Extent in both directions, never zero."""
    across, up = zip(*points, strict=True)
    return (max(across) - min(across)) or 1.0, max(up) or 1.0


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
