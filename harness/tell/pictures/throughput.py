"""Throughput of each cell relative to the base of its place, with the interval of that ratio."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED
from harness.judge.ranking import Ranking
from harness.judge.repeats import Repeats, rivals
from harness.judge.statistics import LEVEL, interval_runs
from harness.judge.wording import percent
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.order_words import bases_words
from harness.tell.pictures.bars import bar, bar_chart, interval, text_after
from harness.tell.pictures.cells import Row, caption, cell_row, drawable, rows_of_all, told
from harness.tell.pictures.drawing import only_drawn


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
    every = rows_of_all(known, drawn, lambda group: [_row(group, known, shown[group.place])])
    rows = only_drawn(every)
    text = f"Throughput relative to {bases_words(shown.values())}, median over rounds."
    layers = [bar("value", title), interval("low", "high"), text_after("end")]
    return Picture(
        key="throughput",
        caption=caption(f"{text} {_lines(list(shown.values()))}", drawn, known),
        alt=f"Bars: {title}. {told(rows)}.",
        chart=lambda: bar_chart(every, layers),
    )


def _row(group: Repeats, groups: Sequence[Repeats], order: Ranking) -> Row:
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
