"""Memory against throughput with the Pareto frontier, and throughput relative to the base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED
from harness.judge.ranking import Ranking, frontier
from harness.judge.repeats import BASE, Repeats, place_to_compare, rank_speeds, rivals
from harness.judge.statistics import LEVEL, interval_runs
from harness.judge.wording import listed, percent, ranks
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.order_words import bases_words, unranked_words
from harness.tell.pictures.bars import (
    MOST_CELLS,
    MOST_NAMED,
    Row,
    bar,
    bar_chart,
    caption,
    cell_row,
    drawable,
    interval,
    rows_of_all,
    text_after,
    told,
)
from harness.tell.pictures.curves import LINE, along, beside
from harness.tell.pictures.drawing import layer, only_drawn

WIDTH, HEIGHT = 600, 360
MARGIN = 0.08
FAR = 4.0
"""Times the median: a cell beyond it would press the others into one column but for a logarithmic axis."""
Point = tuple[float, float]


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
    order = comparison.rankings.get(place) or rank_speeds(groups)
    peaks = {group.label: float(max(group.rank_peaks)) for group in groups}
    best = frontier(peaks, order)
    base = next((_point(group) for group in groups if group.backend == BASE), None)
    drawn = _drawn(groups, best)
    rows = [_row(group, drawn, base, best) for group in drawn]
    unit = f", % of {BASE}" if base else ""
    scale = " (logarithmic)" if is_far([row["memory"] for row in rows]) else ""
    titles = (f"peak memory of a rank{unit or ', MB'}{scale}", f"throughput{unit or ', tokens/s'}")
    where = ranks(place[1])
    return Picture(
        key="trade-off",
        caption=(
            f"Throughput against peak memory on {where}, medians: up and left is better. "
            f"{_frontier_words(best, order)}"
            + (
                f" Drawn: {len(drawn)} of {len(groups)} cells, those of highest median throughput."
                if len(drawn) < len(groups)
                else ""
            )
        ),
        alt=f"Scatter of {titles[1]} over {titles[0]} on {where}. {_told(rows)}.",
        chart=lambda: _chart(rows, titles, from_zero=base is None),
    )


def _frontier_words(best: Sequence[str], order: Ranking) -> str:
    if not order.is_judged:
        return f"No frontier is drawn: {unranked_words(order)}."
    if len(best) == 1:
        return f"No cell that needs more memory than {best[0]} is shown to be faster."
    return f"Dashed: Pareto frontier, each step shown to be faster: {listed(best, len(best))}."


def _drawn(groups: Sequence[Repeats], best: Sequence[str]) -> list[Repeats]:
    """All, or of many those of the frontier and of highest throughput, in their order."""
    importance = sorted(groups, key=lambda group: (group.label not in best, -_point(group)[1]))
    kept = {group.label for group in importance[:MOST_CELLS]}
    return [group for group in groups if group.label in kept]


def _point(group: Repeats) -> Point:
    return max(group.rank_peaks) / 1e6, group.median(SPEED) or 0.0


def _row(group: Repeats, groups: Sequence[Repeats], base: Point | None, best: Sequence[str]) -> Row:
    memory, rate = _point(group)
    return cell_row(
        group, groups, megabytes=memory, tokens_per_second=rate, on_frontier=group.label in best,
        memory=100 * memory / base[0] if base else memory, rate=100 * rate / base[1] if base else rate,
    )  # fmt: skip


def _told(rows: Sequence[Row]) -> str:
    figures = [
        f"{row['name']} {number(row['megabytes'])} MB, {number(row['tokens_per_second'])} tokens/s"
        for row in sorted(rows, key=lambda row: -row["rate"])
    ]
    return "; ".join(figures[:MOST_NAMED]) + ("; ..." if len(figures) > MOST_NAMED else "")


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Both axes of the picture, and where a pixel of the panel lies on them."""

    across: Point
    up: Point
    is_logarithmic: bool
    """Across."""

    def pixel(self, x: float, y: float) -> Point:
        low, high, at = map(self._even, (*self.across, x))
        return WIDTH * (at - low) / (high - low), HEIGHT * (1 - y / self.up[1])

    def x(self, pixel: float) -> float:
        low, high = map(self._even, self.across)
        at = low + pixel / WIDTH * (high - low)
        return math.exp(at) if self.is_logarithmic else at

    def _even(self, x: float) -> float:
        return math.log(x) if self.is_logarithmic else x

    def y(self, pixel: float) -> float:
        return self.up[1] * (1 - pixel / HEIGHT)

    def channels(self, x: str, y: str, titles: tuple[str, str]) -> dict[str, Any]:
        kinds = ("log" if self.is_logarithmic else "linear", "linear")
        fields = zip("xy", (x, y), titles, (self.across, self.up), kinds, strict=True)
        return {
            channel: {
                "field": field,
                "type": "quantitative",
                "title": title,
                "scale": {"type": kind, "domain": list(domain), "nice": False}
                | ({} if kind == "log" else {"zero": False}),
            }
            for channel, field, title, domain, kind in fields
        }


def _panel(rows: Sequence[Row], *, from_zero: bool) -> _Panel:
    memories = [row["memory"] for row in rows]
    up = (0.0, (1 + MARGIN) * max(r["rate"] for r in rows))
    if is_far(memories):
        margin = (max(memories) / min(memories)) ** MARGIN
        across = (min(memories) / margin, max(memories) * margin)
        return _Panel(across=across, up=up, is_logarithmic=True)
    margin = MARGIN * ((max(memories) - min(memories)) or max(memories) or 1.0)
    low = 0.0 if from_zero else min(memories) - margin
    return _Panel(across=(low, max(memories) + margin), up=up, is_logarithmic=False)


def is_far(memories: Sequence[float]) -> bool:
    """Whether one lies so far from the others that only a logarithmic axis shows these."""
    return min(memories) > 0 and max(memories) > FAR * median(memories)


def _named(rows: Sequence[Row], panel: _Panel) -> list[Row]:
    """The rows with the place of their name, and of the end of a line that leads to it."""
    pixels = [panel.pixel(row["memory"], row["rate"]) for row in rows]
    front = sorted(pixel for row, pixel in zip(rows, pixels, strict=True) if row["on_frontier"])
    steps = [corner for (x0, y0), (x1, y1) in pairwise(front) for corner in ((x0, y0), (x1, y0), (x1, y1))]
    boxes = beside(pixels, [row["name"] for row in rows], WIDTH, HEIGHT, along(steps))
    placed = []
    for row, box, (x, y) in zip(rows, boxes, pixels, strict=True):
        edge = min(max(x, box.left), box.left + box.width)
        led = abs(box.middle - y) > 1
        placed.append(
            row
            | {
                "label_x": panel.x(box.left + box.width / 2),
                "label_y": panel.y(box.middle),
                "leader_x": panel.x(edge if led else x),
                "leader_y": panel.y(box.middle + (LINE / 2 if box.middle < y else -LINE / 2) if led else y),
            }
        )
    return placed


def _chart(rows: Sequence[Row], titles: tuple[str, str], *, from_zero: bool) -> dict[str, Any]:
    panel = _panel(rows, from_zero=from_zero)
    at, of_names = panel.channels("memory", "rate", titles), panel.channels("label_x", "label_y", titles)
    names = {f"{channel}_of_names": place for channel, place in of_names.items()}
    layers = layer("trade_off", **at, **names)
    return {"data": {"values": _named(rows, panel)}, "width": WIDTH, "height": HEIGHT, "layer": layers}


def throughput_picture(comparison: Comparison) -> Picture | None:
    """Bars of every cell that may be compared with another; None where there are none."""
    orders = comparison.rankings
    known = [
        group
        for place, groups in rivals(comparison.groups).items()
        if len(groups) > 1
        for name in orders[place].names
        for group in groups
        if group.label == name and orders[place].ratio(name, orders[place].base).middle
    ]
    drawn = drawable(known)
    if not drawn:
        return None
    shown = {group.place: orders[group.place] for group in known}
    title = f"throughput, % of {bases_words(shown.values())} on the same ranks"
    every = rows_of_all(known, drawn, lambda group: [_throughput_row(group, known, shown[group.place])])
    rows = only_drawn(every)
    text = f"Throughput relative to {bases_words(shown.values())}, median over rounds."
    layers = [bar("value", title), interval("low", "high"), text_after("end")]
    return Picture(
        key="throughput",
        caption=caption(f"{text} {_lines(list(shown.values()))}", drawn, known),
        alt=f"Bars: {title}. {told(rows)}.",
        chart=lambda: bar_chart(every, layers),
    )


def _throughput_row(group: Repeats, groups: Sequence[Repeats], order: Ranking) -> Row:
    rate = group.median(SPEED) or 0.0
    ratio = order.ratio(group.label, order.base)
    value, extent = 100 * (ratio.middle or 0.0), None if group.label == order.base else ratio.extent
    low, high = (100 * extent.low, 100 * extent.high) if extent else (None, None)
    text = f"{value:.0f} %"
    if group.label == order.base:
        text = f"{text} = {number(rate)} tokens/s"
    return cell_row(
        group, groups, tokens_per_second=rate, value=value, low=low, high=high,
        end=max(value, high or 0.0), text=text, runs=len(group.values(SPEED)),
    )  # fmt: skip


def _lines(orders: Sequence[Ranking]) -> str:
    if not any(order.is_judged for order in orders):
        return f"Fewer than {interval_runs()} rounds: no interval is known, and no order."
    return f"Lines: {percent(LEVEL)} interval of the ratio in the same round."
