"""Pictures over two axes: losses, scaling, speed against memory; and speed relative to the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from math import ceil, copysign, floor, log1p, log10
from statistics import median
from typing import Any

from harness.judge.agreement.parity import is_variant
from harness.judge.comparison import Comparison, ScalingPoint
from harness.judge.facts import SPEED
from harness.judge.rows import CellRuns, place_to_compare, rivals
from harness.judge.statistics import LEVEL, Ranking, frontier, interval_runs
from harness.judge.wording import counted, listed, ranks
from harness.record import Record
from harness.record.workload import known_strategy
from harness.tell.document import Picture
from harness.tell.formats import number, percent, scientific, times
from harness.tell.pictures.bars import (
    MOST_CELLS,
    MOST_NAMED,
    bar,
    bar_chart,
    caption,
    cell_row,
    cut_at,
    drawable,
    drawn_name,
    interval,
    rows_of_all,
    text_after,
    told,
)
from harness.tell.pictures.drawing import (
    FAMILIES,
    LINE,
    VERDICTS,
    Panel,
    Row,
    along,
    beside,
    channel,
    layer,
    look_of,
    only_drawn,
    spread,
)
from harness.tell.tables import bases_words, prose, unranked_words

Spec = dict[str, Any]


Channel = Callable[[str], Spec]
"""The vertical channel of a panel for a field."""
MOST_TICKS = 11


def x_channel(steps: Sequence[int], *, titled: bool) -> Spec:
    """Steps from the first to the last; ticks are whole steps, at most `MOST_TICKS`."""
    first, last = min(steps), max(steps)
    strides = (digit * 10**power for power in count() for digit in (1, 2, 5))
    stride = next(stride for stride in strides if last // stride - (first - 1) // stride <= MOST_TICKS)
    ticks = list(range(-(-first // stride) * stride, last + 1, stride))
    title = "optimizer step" if titled else None
    found: Spec = layer("steps", title=title, domain=[first, last], ticks=ticks)
    return found


def band_of(x: Spec, y: Channel, field: str) -> list[Spec]:
    """From the least to the most of each step over the cells of one verdict, then each that diverged."""
    verdicts = {"verdicts": list(VERDICTS), "colours": list(VERDICTS.values())}
    outliers: list[Spec] = layer("outliers", x=x, y=y("value"), field=field)
    return [layer("band", x=x, least=y("least"), field=field, **verdicts), *outliers]


Curve = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class LossLine:
    """The losses of one cell, medians over its runs."""

    group: CellRuns
    losses: Curve
    differences: Curve
    """Empty for the reference, and without one."""

    @property
    def verdict(self) -> str:
        """'agrees', 'diverged' or 'not judged'."""
        parity = self.group.parity
        return {"diverged": "diverged", "unjudged": "not judged"}.get(parity, "agrees")

    @property
    def largest(self) -> float:
        """Largest difference to the reference."""
        return max(map(abs, self.differences.values()), default=0.0)


def loss_lines(comparison: Comparison) -> list[LossLine]:
    """Of every cell with a finite loss, in their order."""
    groups = comparison.groups
    references = {
        group.record.job_id: _loss_curve(row.record for row in group.rows)
        for group in reversed(groups)
        if group.is_reference
    }
    lines = []
    for group in groups:
        losses = _loss_curve(row.record for row in group.rows)
        expected = {} if group.is_reference else references.get(group.record.job_id, {})
        cut = [r.record for row in group.rows if (r := row.reference) is not None and is_variant(r.record)]
        if cut:
            expected = _loss_curve(cut)
        if losses:
            differences = {step: loss - expected[step] for step, loss in losses.items() if step in expected}
            lines.append(LossLine(group=group, losses=losses, differences=differences))
    return lines


def _loss_curve(records: Iterable[Record]) -> Curve:
    """Median loss of each step over the repeats that reached it with a finite loss."""
    found: dict[int, list[float]] = {}
    for record in records:
        for step in record.steps:
            if step.loss is not None:
                found.setdefault(step.step, []).append(step.loss)
    return {step: median(losses) for step, losses in found.items()}


MOST_STEPS, LEAST_STEPS, MOST_POINTS = 200, 20, 20_000
"""Of more steps, or more points of all cells together, every second, third, ... step is drawn."""
WIDTH, NARROW = 540, 300
UPPER, LOWER = 220, 150
EXTENT = 48
"""Pixels of the numbers at a vertical axis, so that panels below each other are in line."""
DIGITS, DIFFERENCE_DIGITS = 6, 4


def loss_chart(lines: Sequence[LossLine]) -> Spec:
    """Two panels for each job: losses, and where there is a reference their differences to it."""
    every = _rows(lines)
    jobs = list(dict.fromkeys(row["job"] for row in every))
    width, of_jobs = NARROW if len(jobs) > 1 else WIDTH, []
    for job in jobs:
        rows = [row for row in every if row["job"] == job]
        judged = [row for row in rows if row["differences"]]
        steps = [step for row in rows for step in row["steps"]]
        losses = _losses(rows, x_channel(steps, titled=not judged))
        panels = [{"width": width, "height": UPPER, "layer": losses}]
        if judged:
            differences = _differences(judged, x_channel(steps, titled=True))
            panels.append({"width": width, "height": LOWER, "layer": differences})
        chart: Spec = {"vconcat": panels, "spacing": 10}
        if len(jobs) > 1:
            chart |= {"title": job, "transform": [{"filter": {"field": "job", "equal": job}}]}
        of_jobs.append(chart)
    charts = {"hconcat": of_jobs, "spacing": 28} if len(jobs) > 1 else of_jobs[0]
    return {"data": {"values": every}, **charts}


def _rows(lines: Sequence[LossLine]) -> list[Row]:
    """One for each cell; its curves are lists, which the specification lays out."""
    groups = [line.group for line in lines]
    steps = sorted({step for line in lines for step in line.losses})
    most = min(MOST_STEPS, max(LEAST_STEPS, MOST_POINTS // len(lines)))
    stride = ceil(len(steps) / most)
    drawn = {*steps[::stride], *steps[-1:]}
    job_names = _job_names(groups)
    rows = []
    for line in lines:
        of_line = [step for step in sorted(line.losses) if step in drawn] or sorted(line.losses)[-1:]
        differences = [_rounded(line.differences.get(step), DIFFERENCE_DIGITS) for step in of_line]
        rows.append(
            cell_row(
                line.group, [line.group], verdict=line.verdict, job=job_names[line.group.record.job_id],
                is_compared=int(not line.group.is_reference),
                limit=limits.loss if (limits := line.group.limits) else None, steps=of_line,
                losses=[_rounded(line.losses[step], DIGITS) for step in of_line],
                differences=differences if line.differences else [],
            )
        )  # fmt: skip
    return rows


def _job_names(groups: Sequence[CellRuns]) -> dict[str, str]:
    """'2 ranks, job 012345' by the job's id; the reference, on one process, counts where it is alone."""
    sizes: dict[str, set[int]] = {}
    for group in sorted(groups, key=lambda group: group.is_reference):
        found = sizes.setdefault(group.record.job_id, set())
        if not (group.is_reference and found):
            found.add(group.world_size)
    return {job: f"{ranks(*sorted(of_job))}, job {job[:6]}" for job, of_job in sizes.items()}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _losses(rows: Sequence[Row], x: Spec) -> list[Spec]:
    values = [loss for row in rows for loss in row["losses"]]
    margin = 0.04 * (max(values) - min(values) or abs(max(values)) or 1.0)
    low, high = min(values) - margin, max(values) + margin
    scale = {"domain": [low, high], "nice": False, "zero": False}
    _place_names(rows, "losses", lambda loss: UPPER * (1 - (loss - low) / (high - low)), UPPER)
    axis = {"tickCount": 5, "minExtent": EXTENT}
    y = partial(channel, title="loss, nats per token", scale=scale, axis=axis)
    return [*band_of(x, y, "losses"), layer("band_name")]


def _differences(rows: Sequence[Row], x: Spec) -> list[Spec]:
    """Linear while all is within the limit; else linear within it and logarithmic beyond."""
    found = [abs(value) for row in rows for value in row["differences"] if value is not None]
    limit = max((row["limit"] for row in rows if row["limit"]), default=0.0)
    top = max([*found, limit]) * 1.3 or 1.0
    scale: Spec = {"domain": [-top, top], "nice": False, "zero": True}
    label = "datum.value == 0 ? '0' : format(datum.value, '.0e')"
    axis: Spec = {"tickCount": 5, "labelExpr": label, "minExtent": EXTENT}
    if limit and max(found) > limit:
        scale |= {"type": "symlog", "constant": limit}
        axis["values"] = _ticks(limit, top)

    def height(value: float) -> float:
        share = _symlog(value, limit) / _symlog(top, limit) if "type" in scale else value / top
        return LOWER / 2 * (1 - share)

    _place_names(rows, "differences", height, LOWER)
    y = partial(channel, title="minus reference", scale=scale, axis=axis)
    limits: list[Spec] = layer("limit_band", limit=y("limit"), lower=y("lower"))
    return [*limits, *band_of(x, y, "differences")]


def _symlog(value: float, constant: float) -> float:
    """Vega's scale: the sign times log(1 + |value| / constant)."""
    return copysign(log1p(abs(value) / constant), value)


def _ticks(limit: float, top: float) -> list[float]:
    """Powers of ten beyond the limit on both sides, at most three on each."""
    first, last = ceil(log10(limit)), floor(log10(top))
    stride = max(1, ceil((last - first + 1) / 3))
    powers = [10.0**power for power in range(last, first - 1, -stride)]
    return [*(-power for power in powers), 0.0, *reversed(powers)]


def _place_names(rows: Sequence[Row], field: str, height: Callable[[float], float], panel: int) -> None:
    """Give each row the pixel at which its name stands; cells that agree share one."""
    ends = [next((value for value in reversed(row[field]) if value is not None), 0.0) for row in rows]
    names = [row["cell"] if row["verdict"] == "diverged" else row["verdict"] for row in rows]
    last = dict(zip(names, ends, strict=True))
    places = dict(zip(last, spread([height(end) for end in last.values()], 0, panel), strict=True))
    for row, name in zip(rows, names, strict=True):
        row[f"{field}_label"] = places[name]


MOST_OUTLIERS = 8
MOST_JOBS = 4
"""Each has a panel of its own."""


def loss_picture(comparison: Comparison) -> Picture | None:
    """A band of the cells that agree, and each that does not; None without any loss."""
    lines = loss_lines(comparison)
    if not lines:
        return None
    drawn = _drawn(lines)
    limits = sorted({
        limits.loss for line in lines if line.differences and (limits := line.group.limits) is not None
    })  # fmt: skip
    outliers = [line for line in lines if line.verdict == "diverged"]
    agreeing = [line for line in lines if line.verdict == "agrees"]
    text = "Loss over steps, medians over runs; the shaded area spans all cells that agree."
    if any(line.differences for line in lines):
        text += " Below: difference to the reference"
        text += f", limit {listed([scientific(limit) for limit in limits])}." if limits else "."
    if len(drawn) < len(lines):
        text += f" Drawn: {len(drawn)} of {len(lines)} cells, those furthest from their reference first."
    return Picture(
        key="loss",
        caption=text,
        alt=_alt(lines, agreeing, outliers),
        chart=lambda: loss_chart(drawn),
    )


def _drawn(lines: Sequence[LossLine]) -> list[LossLine]:
    """Those of the first jobs, and of what diverged the furthest, in their order."""
    jobs = list(dict.fromkeys(line.group.record.job_id for line in lines))[:MOST_JOBS]
    of_jobs = [line for line in lines if line.group.record.job_id in jobs]
    outliers = [line for line in of_jobs if line.verdict == "diverged"]
    outliers.sort(key=lambda line: -line.largest)
    left_out = {id(line) for line in outliers[MOST_OUTLIERS:]}
    return [line for line in of_jobs if id(line) not in left_out]


def _alt(lines: Sequence[LossLine], agreeing: Sequence[LossLine], outliers: Sequence[LossLine]) -> str:
    first, last = (pick(lines[0].losses) for pick in (min, max))
    parts = [
        f"Loss over steps {first} to {last}: {number(lines[0].losses[first])} to "
        f"{number(lines[0].losses[last])} nats per token for {lines[0].group.label}."
    ]
    if compared := [line for line in agreeing if not line.group.is_reference]:
        largest = max(line.largest for line in compared)
        parts.append(
            f"{counted(len(compared), 'cell')} within the limit, at most {scientific(largest)} from "
            "the reference."
        )
    if outliers:
        named = [f"{line.group.cell} ({scientific(line.largest)})" for line in outliers]
        parts.append(f"Diverged, with the largest difference of their loss: {listed(named, MOST_NAMED)}.")
    return " ".join(parts)


MOST_CURVES = 24
MOST_IN_ONE = 8
"""More curves are drawn in a panel for each family."""
COLUMNS = 2
BESIDE = 0.012
"""Of the way across, between the intervals of two curves at one point."""
PANELS = list(dict.fromkeys(name.partition("-")[0] for name, _ in FAMILIES.values()))
"""The stages of ZeRO share one."""
Curves = Sequence[Sequence[ScalingPoint]]


def strong_picture(curves: Curves) -> Picture | None:
    """Speed-up of one job, of many curves those of the shortest steps."""
    return _picture("strong-scaling", prose("strong_picture"), curves, strong=True)


def weak_picture(curves: Curves) -> Picture | None:
    """Efficiency of jobs that grow with the ranks."""
    return _picture("weak-scaling", prose("weak_picture"), curves, strong=False)


def _picture(key: str, text: str, curves: Curves, *, strong: bool) -> Picture | None:
    if not curves:
        return None
    if any(point.ratio.extent for curve in curves for point in curve):
        text += f" Vertical lines: {percent(LEVEL)} interval of the ratio in the same round."
    shortest = sorted(curves, key=lambda curve: curve[-1].step_seconds)[:MOST_CURVES]
    drawn = [curve for curve in curves if curve in shortest]
    if len(drawn) < len(curves):
        text += " " + prose("scaling_drawn", drawn=len(drawn), all=len(curves))
    last = [curve[-1] for curve in drawn]
    ends = [f"{p.curve} {_text(p, strong)} on {ranks(p.group.world_size)}" for p in last]
    what = "Speed-up" if strong else "Weak-scaling efficiency"
    return Picture(
        key=key, caption=text, alt=f"{what} over the number of ranks. {listed(ends, MOST_NAMED)}.",
        chart=lambda: _chart(drawn, strong),
    )  # fmt: skip


def _text(point: ScalingPoint, strong: bool) -> str:
    return f"{times(point.speed_up)} x" if strong else percent(point.weak_efficiency)


def _chart(curves: Curves, strong: bool) -> dict[str, Any]:
    rows = _scaling_rows(curves, strong)
    many = len(curves) > MOST_IN_ONE
    panel = _panel(rows, strong, (260, 210) if many else (460, 340))
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row["panel"] if many else "", []).append(row)
    for of_family in families.values():
        panel.place_labels(of_family)
    sizes = sorted({row["ranks"] for row in rows})
    ideal = layer("ideal", x=panel.x(sizes), y={**panel.y("ideal"), "aggregate": "max"})
    whiskers = layer("whiskers", x={**panel.x(sizes), "field": "beside"}, y=panel.y("low"))
    unit = {"width": panel.width, "height": panel.height, "layer": [ideal, whiskers, *panel.layers(sizes)]}
    if not many:
        return {"data": {"values": rows}, **unit}
    facet = {"field": "panel", "type": "nominal", "title": None, "sort": PANELS}
    return {"data": {"values": rows}, "facet": facet, "columns": COLUMNS, "spec": unit, "spacing": 24}


def _scaling_rows(curves: Curves, strong: bool) -> list[Row]:
    several = len({curve[-1].group.record.job_id for curve in curves}) > 1 and strong
    groups = [point.group for curve in curves for point in curve]
    least = min(point.base.world_size for curve in curves for point in curve)
    rows = []
    for index, curve in enumerate(curves):
        last = curve[-1]
        job = f", job {last.group.record.job_id[:6]}" if several else ""
        name = drawn_name(last.curve, [each[-1].curve for each in curves]) + job
        # The reference may be the first point of a curve: it is drawn as the curve is.
        look = look_of(known_strategy(last.group.record))
        for point in curve:
            extent, unit = point.ratio.extent, 1 if strong else 100
            row = cell_row(
                point.group, groups, curve=index, x=point.group.world_size,
                value=point.speed_up if strong else 100 * point.weak_efficiency,
                label=f"{name} {_text(point, strong)}" if point is last else None,
                low=unit * extent.low if extent else None, high=unit * extent.high if extent else None,
                beside=point.group.world_size * (1 - BESIDE * (index + 1)),
                ideal=point.group.world_size / least if strong else 100.0,
                panel=look["family"].partition("-")[0],
            )  # fmt: skip
            rows.append(row | look)
    return rows


def _panel(rows: Sequence[Row], strong: bool, size: tuple[int, int]) -> Panel:
    names = ("value", "ideal", "low", "high")
    values = [value for row in rows for name in names if (value := row[name]) is not None]
    width, height = size
    if not strong:
        return Panel(
            across="ranks", up="weak-scaling efficiency (%)", domain=(0, 1.08 * max(values)), is_log=False,
            width=width, height=height, x_axis={"format": "d"},
        )  # fmt: skip
    low, high = 0.9 * min(values), 1.15 * max(values)
    ticks = [2.0**power for power in range(-20, 20) if low <= 2.0**power <= high]
    text = "datum.value < 1 ? '1/' + 1 / datum.value : '' + datum.value"
    return Panel(
        across="ranks", up="speed-up (log scale)", domain=(low, high), is_log=True, width=width,
        height=height, x_axis={"format": "d"}, y_axis={"values": ticks, "labelExpr": text},
    )  # fmt: skip


PLANE_WIDTH, PLANE_HEIGHT = 600, 360
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
    # Of many those of the frontier and of highest throughput, in their order.
    importance = sorted(groups, key=lambda group: (group.label not in best, order.names.index(group.label)))
    kept = {group.label for group in importance[:MOST_CELLS]}
    drawn = [group for group in groups if group.label in kept]
    cut = cut_at([100 * peaks[group.label] / peaks[order.base] for group in drawn])
    rows = [_row(group, drawn, order, peaks, cut, group.label in best) for group in drawn]
    base = bases_words([order])
    titles = (f"peak memory of a rank, % of {base}", f"throughput, % of {base} on the same ranks")
    words = f"Dashed: Pareto frontier, each step shown to be faster: {listed(best, len(best))}."
    if not order.is_judged:
        words = f"No frontier is drawn: {unranked_words(order)}."
    elif len(best) == 1:
        words = f"No cell that needs more memory than {best[0]} is shown to be faster."
    text = prose("trade_off_picture", base=base, where=where, frontier=words)
    figures = [
        f"{row['name']} {number(row['megabytes'])} MB, {row['rate']:.0f} %"
        for row in sorted(rows, key=lambda row: -row["rate"])
    ]
    told_here = "; ".join([*figures[:MOST_NAMED], *(["..."] if len(figures) > MOST_NAMED else [])])
    if cut is not None:
        text += f" Memory is cut at {cut:.0f} %: beyond it, names end with the figure."
    if len(drawn) < len(groups):
        text += f" Drawn: {len(drawn)} of {len(groups)} cells, those of highest throughput."
    return Picture(
        key="trade-off",
        caption=text,
        alt=f"Scatter of {titles[1]} over {titles[0]}. {where}: {told_here}.",
        chart=lambda: _trade_off_chart(rows, titles),
    )


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


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Both axes of the picture, and where a pixel of the panel lies on them."""

    across: Point
    up: Point

    def pixel(self, x: float, y: float) -> Point:
        low, high = self.across
        return PLANE_WIDTH * (x - low) / (high - low), PLANE_HEIGHT * (1 - y / self.up[1])

    def x(self, pixel: float) -> float:
        low, high = self.across
        return low + pixel / PLANE_WIDTH * (high - low)

    def y(self, pixel: float) -> float:
        return self.up[1] * (1 - pixel / PLANE_HEIGHT)

    def channels(self, x: str, y: str, titles: tuple[str, str]) -> dict[str, Any]:
        fields = zip("xy", (x, y), titles, (self.across, self.up), strict=True)
        return {
            name: channel(field, title=title, scale={"domain": list(domain), "nice": False, "zero": False})
            for name, field, title, domain in fields
        }


def _named(rows: Sequence[Row], panel: _Panel) -> list[Row]:
    """The rows with the place of their name, and of the end of a line that leads to it."""
    pixels = [panel.pixel(row["memory"], row["rate"]) for row in rows]
    front = sorted(pixel for row, pixel in zip(rows, pixels, strict=True) if row["on_frontier"])
    steps = [corner for (x0, y0), (x1, y1) in pairwise(front) for corner in ((x0, y0), (x1, y0), (x1, y1))]
    boxes = beside(pixels, [row["label"] for row in rows], PLANE_WIDTH, PLANE_HEIGHT, along(steps))
    placed = []
    for row, box, (x, y) in zip(rows, boxes, pixels, strict=True):
        edge = min(max(x, box.left), box.left + box.width)
        led = abs(box.middle - y) > 1
        label = {
            "label_x": panel.x(box.left + box.width / 2),
            "label_y": panel.y(box.middle),
            "leader_x": panel.x(edge if led else x),
            "leader_y": panel.y(box.middle + (LINE / 2 if box.middle < y else -LINE / 2) if led else y),
        }
        placed.append(row | label)
    return placed


def _trade_off_chart(rows: Sequence[Row], titles: tuple[str, str]) -> dict[str, Any]:
    memories = [row["memory"] for row in rows]
    margin = MARGIN * ((max(memories) - min(memories)) or max(memories) or 1.0)
    up = (0.0, (1 + MARGIN) * max(row["rate"] for row in rows))
    panel = _Panel(across=(min(memories) - margin, max(memories) + margin), up=up)
    at, of_names = panel.channels("memory", "rate", titles), panel.channels("label_x", "label_y", titles)
    names = {f"{channel}_of_names": place for channel, place in of_names.items()}
    size = {"width": PLANE_WIDTH, "height": PLANE_HEIGHT}
    return {"data": {"values": _named(rows, panel)}, **size, "layer": layer("trade_off", **at, **names)}


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
    lines = f"Lines: {percent(LEVEL)} interval of the ratio in the same round."
    if not any(order.is_judged for order in shown.values()):
        lines = f"Fewer than {interval_runs()} rounds: no interval is known, and no order."
    text = f"Throughput relative to {bases_words(shown.values())}, median over rounds. {lines}"
    layers = [bar("value", title), interval("low", "high"), text_after("end")]
    return Picture(
        key="throughput",
        caption=caption(text, drawn, known),
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
