"""Throughput of each cell relative to DDP at the same place, with the interval of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.judge.comparison import Comparison
from harness.judge.metrics import SPEED
from harness.judge.repeats import Place, Repeats, rivals
from harness.judge.statistics import Interval, interval_runs, shown_interval
from harness.tell.document import Picture
from harness.tell.formats import number
from harness.tell.pictures.bars import bar, bar_chart, interval, text_after
from harness.tell.pictures.cells import Row, caption, cell_row, drawable, rows_of_all, told
from harness.tell.pictures.drawing import only_drawn

BASE = "ddp"


@dataclass(frozen=True)
class _Scale:
    """What a bar is measured in at each place."""

    bases: dict[Place, float]
    """Median throughput of DDP; empty: tokens per second are drawn."""

    @property
    def title(self) -> str:
        return f"throughput, % of {BASE} on the same ranks" if self.bases else "throughput, tokens/s"

    def of(self, group: Repeats, rate: float) -> float:
        return 100 * rate / self.bases[group.place] if self.bases else rate

    def text(self, group: Repeats, rate: float) -> str:
        if not self.bases:
            return number(rate)
        share = f"{self.of(group, rate):.0f} %"
        return f"{share} = {number(rate)} tokens/s" if group.backend == BASE else share


def throughput_picture(comparison: Comparison) -> Picture | None:
    """Bars of every cell that may be compared with another; None where there are none."""
    places = {place: groups for place, groups in rivals(comparison.groups).items() if len(groups) > 1}
    bases = {
        place: rate
        for place, groups in places.items()
        for group in groups
        if group.backend == BASE and (rate := group.median(SPEED))
    }
    if bases.keys() != places.keys():
        bases = {}
    known = [group for groups in places.values() for group in groups]
    drawn = drawable(known)
    if not drawn:
        return None
    scale = _Scale(bases)
    order = list(places)
    known.sort(key=lambda group: (order.index(group.place), -(group.median(SPEED) or 0.0)))
    every = rows_of_all(known, drawn, lambda group: [_row(group, known, scale)])
    rows = only_drawn(every)
    text = f"{'Throughput relative to ' + BASE if bases else 'Throughput'}, medians over runs."
    layers = [bar("value", scale.title), interval("low", "high"), text_after("end")]
    return Picture(
        key="throughput",
        caption=caption(f"{text} {_lines(drawn)}", drawn, known),
        alt=f"Bars: {scale.title}. {told(rows)}.",
        chart=lambda: bar_chart(every, layers),
    )


def _row(group: Repeats, groups: Sequence[Repeats], scale: _Scale) -> Row:
    rate = group.median(SPEED) or 0.0
    value = scale.of(group, rate)
    found = _interval(group)
    low, high = (scale.of(group, found.low), scale.of(group, found.high)) if found else (None, None)
    return cell_row(
        group, groups, tokens_per_second=rate, value=value, low=low, high=high,
        end=max(value, high or 0.0), text=scale.text(group, rate), runs=len(group.values(SPEED)),
    )  # fmt: skip


def _interval(group: Repeats) -> Interval | None:
    """None of a single run."""
    values = group.values(SPEED)
    return shown_interval(values) if len(values) > 1 else None


def _lines(groups: Sequence[Repeats]) -> str:
    counts = [len(group.values(SPEED)) for group in groups]
    if max(counts) < 2:
        return "One run each: no spread is known."
    what = "95 % interval of the median" if min(counts) >= interval_runs() else "range of the runs"
    if max(counts) >= interval_runs() > min(counts):
        what += f", the 95 % interval of the median from {interval_runs()} runs on"
    if len({run.occasion for group in groups for run in group.runs}) > 1:
        return f"Lines: {what}, over all occasions; cells are compared within each."
    return f"Lines: {what}; cells whose lines overlap are in no order."
