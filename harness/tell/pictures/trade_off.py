"""Speed against memory with the Pareto frontier, and speed relative to the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED
from harness.judge.ranking import Ranking, frontier
from harness.judge.repeats import CellRuns, place_to_compare, rivals
from harness.judge.statistics import LEVEL, interval_runs
from harness.judge.wording import listed, percent, ranks
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.order_words import bases_words, unranked_words
from harness.tell.pictures.bars import (
    MOST_CELLS,
    MOST_NAMED,
    bar,
    bar_chart,
    caption,
    cell_row,
    cut_at,
    drawable,
    interval,
    rows_of_all,
    text_after,
    told,
)
from harness.tell.pictures.curves import LINE, along, beside
from harness.tell.pictures.drawing import Row, layer, only_drawn

WIDTH, HEIGHT = 600, 360
MARGIN = 0.08
Point = tuple[float, float]


def trade_off_picture(comparison: Comparison) -> Picture | None:
    """Each backend where the verdict compares them, as the tables do: relative to the base of that place.

    None below two of them. What left its reference does other work and is not shown.
    """
    rivalling = [group for of_place in rivals(comparison.groups).values() for group in of_place]
    place = place_to_compare([group for group in rivalling if group.rank_peaks])
    if place is None:
        return None
    order, where = comparison.rankings[place], ranks(place[1])
    groups = [
        group
        for group in rivalling
        if group.place == place and group.rank_peaks and group.label in order.names
    ]
    peaks = {group.label: float(max(group.rank_peaks)) for group in groups}
    if len(groups) < 2 or order.base not in peaks:
        return None
    best = frontier(peaks, order)
    drawn = _drawn(groups, order, best)
    cut = cut_at([100 * peaks[group.label] / peaks[order.base] for group in drawn])
    rows = [_row(group, drawn, order, peaks, cut, group.label in best) for group in drawn]
    base = bases_words([order])
    titles = (f"peak memory of a rank, % of {base}", f"throughput, % of {base} on the same ranks")
    text = (
        f"Throughput, relative to {base} in the same round, against peak memory on {where}: up and left is "
        f"better. {_frontier_words(best, order)}"
    )
    if cut is not None:
        text += f" Memory is cut at {cut:.0f} %: beyond it, names end with the figure."
    if len(drawn) < len(groups):
        text += f" Drawn: {len(drawn)} of {len(groups)} cells, those of highest throughput."
    return Picture(
        key="trade-off",
        caption=text,
        alt=f"Scatter of {titles[1]} over {titles[0]}. {where}: {_told(rows)}.",
        chart=lambda: _chart(rows, titles),
    )


def _frontier_words(best: Sequence[str], order: Ranking) -> str:
    if not order.is_judged:
        return f"No frontier is drawn: {unranked_words(order)}."
    if len(best) == 1:
        return f"No cell that needs more memory than {best[0]} is shown to be faster."
    return f"Dashed: Pareto frontier, each step shown to be faster: {listed(best, len(best))}."


def _drawn(groups: Sequence[CellRuns], order: Ranking, best: Sequence[str]) -> list[CellRuns]:
    """All, or of many those of the frontier and of highest throughput, in their order."""
    importance = sorted(groups, key=lambda group: (group.label not in best, order.names.index(group.label)))
    kept = {group.label for group in importance[:MOST_CELLS]}
    return [group for group in groups if group.label in kept]


def _row(
    group: CellRuns,
    drawn: Sequence[CellRuns],
    order: Ranking,
    peaks: Mapping[str, float],
    cut: float | None,
    on_frontier: bool,
) -> Row:
    peak, rate = peaks[group.label], 100 * (order.ratio(group.label, order.base).middle or 0.0)
    memory = 100 * peak / peaks[order.base]
    row = cell_row(
        group, drawn, megabytes=peak / 1e6, tokens_per_second=group.median(SPEED), rate=rate,
        memory=memory if cut is None else min(memory, cut), on_frontier=on_frontier,
    )  # fmt: skip
    return row | {"label": row["name"] + (f" → {number(memory)} %" if row["memory"] < memory else "")}


def _told(rows: Sequence[Row]) -> str:
    figures = [
        f"{row['name']} {number(row['megabytes'])} MB, {row['rate']:.0f} %"
        for row in sorted(rows, key=lambda row: -row["rate"])
    ]
    return "; ".join(figures[:MOST_NAMED]) + ("; ..." if len(figures) > MOST_NAMED else "")


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Both axes of the picture, and where a pixel of the panel lies on them."""

    across: Point
    up: Point

    def pixel(self, x: float, y: float) -> Point:
        low, high = self.across
        return WIDTH * (x - low) / (high - low), HEIGHT * (1 - y / self.up[1])

    def x(self, pixel: float) -> float:
        low, high = self.across
        return low + pixel / WIDTH * (high - low)

    def y(self, pixel: float) -> float:
        return self.up[1] * (1 - pixel / HEIGHT)

    def channels(self, x: str, y: str, titles: tuple[str, str]) -> dict[str, Any]:
        fields = zip("xy", (x, y), titles, (self.across, self.up), strict=True)
        return {
            channel: {
                "field": field,
                "type": "quantitative",
                "title": title,
                "scale": {"domain": list(domain), "nice": False, "zero": False},
            }
            for channel, field, title, domain in fields
        }


def _panel(rows: Sequence[Row]) -> _Panel:
    memories = [row["memory"] for row in rows]
    up = (0.0, (1 + MARGIN) * max(r["rate"] for r in rows))
    margin = MARGIN * ((max(memories) - min(memories)) or max(memories) or 1.0)
    return _Panel(across=(min(memories) - margin, max(memories) + margin), up=up)


def _named(rows: Sequence[Row], panel: _Panel) -> list[Row]:
    """The rows with the place of their name, and of the end of a line that leads to it."""
    pixels = [panel.pixel(row["memory"], row["rate"]) for row in rows]
    front = sorted(pixel for row, pixel in zip(rows, pixels, strict=True) if row["on_frontier"])
    steps = [corner for (x0, y0), (x1, y1) in pairwise(front) for corner in ((x0, y0), (x1, y0), (x1, y1))]
    boxes = beside(pixels, [row["label"] for row in rows], WIDTH, HEIGHT, along(steps))
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


def _chart(rows: Sequence[Row], titles: tuple[str, str]) -> dict[str, Any]:
    panel = _panel(rows)
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
        if group.label == name
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


def _throughput_row(group: CellRuns, groups: Sequence[CellRuns], order: Ranking) -> Row:
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
