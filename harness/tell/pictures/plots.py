"""Pictures of a comparison: bars for each cell, losses, scaling, speed against memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from math import ceil, copysign, floor, log1p, log10
from statistics import median
from typing import Any

from harness.forms.terms import STATE_KINDS
from harness.judge import quantities
from harness.judge.agreement.parity import is_variant
from harness.judge.comparison import Comparison, ScalingPoint
from harness.judge.facts import EXPECTED_SENT, SENT, SPEED, TEXTBOOK_SENT
from harness.judge.quantities import largest, loss_unit, rank_states
from harness.judge.rows import CellRuns, place_to_compare, rivals
from harness.judge.statistics import LEVEL, Ranking, frontier, interval_runs
from harness.judge.wording import counted, listed, ranks
from harness.nested import grouped
from harness.record import Record
from harness.record.workload import known_strategy
from harness.tell.document import Picture
from harness.tell.formats import number, one_line, percent, scientific, short, shortened, times
from harness.tell.pictures.drawing import (
    FAMILY_COLOURS,
    GREY,
    KINDS,
    LIMIT,
    LINE,
    VERDICTS,
    Panel,
    Point,
    Row,
    Spec,
    along,
    beside,
    channel,
    layer,
    look_of,
    spread,
)
from harness.tell.tables import bases_words, prose, rate_text, unranked_words

MOST_CELLS = 24
"""More would make the picture longer than a screen; then only one world size is drawn."""
MOST_NAMED = 12
MOST_TOLD = 4
"""Cells in an alternative text."""
LONGEST_LABEL = 34
FARTHEST = 4.0
"""Times the median; what lies beyond it is cut, since it would press the others together."""
ROOM = 1.15
"""What is cut is drawn further out than the largest other one by this factor."""


def cell_row(group: CellRuns, groups: Sequence[CellRuns], **fields: Any) -> Row:
    """A row about a cell; `groups`: all that are drawn."""
    record = group.record
    return {
        "cell": one_line(group.cell.key),
        "backend": one_line(group.label),
        "ranks": group.world_size,
        "name": drawn_name(_name(group), [*map(_name, groups)]),
        "place": place_name(group, groups),
        **look_of(known_strategy(record)),
        **fields,
    }


def _name(group: CellRuns) -> str:
    """Scripts of one strategy are told apart by name, all others by place."""
    return group.label if group.record.observation is not None else group.backend


def drawn_name(name: str, names: Sequence[str]) -> str:
    """A name without its middle where it is long, unless another of the names then looks the same."""
    short = shortened(name, LONGEST_LABEL)
    alike = any(other != name and shortened(other, LONGEST_LABEL) == short for other in names)
    return one_line(name) if alike else short


def place_name(group: CellRuns, groups: Sequence[CellRuns]) -> str:
    """'2 ranks': where a cell is compared with others; run conditions and the job where they tell apart."""
    job_id, size, conditions = group.place
    several = len({other.record.job_id for other in groups if other.world_size == size}) > 1
    return ", ".join(filter(None, [ranks(size), conditions, f"job {job_id[:6]}" if several else ""]))


def cut_at(values: Sequence[float]) -> float | None:
    """Where an axis is cut; None: no value is far beyond the others."""
    most = FARTHEST * median(values)
    if max(values) <= most:
        return None
    return ROOM * max(value for value in values if value <= most)


def drawable(groups: Sequence[CellRuns]) -> list[CellRuns]:
    """Cells that are drawn: all, or the first of the world size at which the verdict compares."""
    if len(groups) <= MOST_CELLS:
        return list(groups)
    place = place_to_compare(groups)
    size = place[1] if place else max(group.world_size for group in groups)
    return [group for group in groups if group.world_size == size][:MOST_CELLS]


def caption(text: str, drawn: Sequence[CellRuns], groups: Sequence[CellRuns]) -> str:
    """The text, and what of the groups is not drawn."""
    if len(drawn) == len(groups):
        return text
    sizes = sorted({group.world_size for group in drawn})
    return f"{text} Drawn: {len(drawn)} of {len(groups)} cells, on {ranks(*sizes)}."


def told(rows: Sequence[Row], text: str = "text") -> str:
    """'2 ranks: ddp 100 %, zero3 31 %; 4 ranks: ...', for an alternative text; long lists are cut."""
    places = grouped((row["place"], f"{row['name']} {row[text]}") for row in rows)
    most = max(2, MOST_TOLD // max(1, len(places)))
    last = max(1, most // 3)
    for cells in places.values():
        if len(cells) > most:
            cells[most - last : -last] = ["..."]
    return "; ".join(f"{place}: {', '.join(cells)}" for place, cells in places.items())


BAR_WIDTH = 520
"""Pixels of a panel, without the names to its left."""
BAR_STEP = 24
"""Pixels of a bar with the gap to the next."""


def bar_chart(rows: Sequence[Row], layers: Sequence[Spec]) -> Spec:
    """Panels under each other; rows carry `place` and `name` and are drawn in their order."""
    return layer("bar_chart", rows=list(rows), width=BAR_WIDTH, step=BAR_STEP, layers=list(layers))


def bar(field: str, title: str) -> Spec:
    """One bar from zero, in the colour of its family."""
    return layer("bar", x=quantity(field, title=title))


def stack(field: str, title: str, by: str, colours: Mapping[str, str]) -> Spec:
    """Bars cut into parts: a row each, with `field`, the name under `by` and the place under `order`."""
    x = {**quantity(field, title=title), "stack": "zero"}
    return layer("stack", x=x, by=by, names=list(colours), colours=list(colours.values()))


def interval(low: str, high: str) -> Spec:
    return layer("interval", x=quantity(low), low=low, high=high)


def text_after(field: str) -> Spec:
    return layer("text_after", x=quantity(field))


def tick(field: str, *, colour: str = GREY) -> Spec:
    """A vertical mark that is higher than the bar."""
    return layer("tick", x=quantity(field), field=field, size=BAR_STEP - 2, colour=colour)


def quantity(field: str, **title: str) -> Spec:
    """A channel from zero."""
    return channel(field, scale={"zero": True}, axis={"tickCount": 6}, **title)


REST = "activations"
LABELS = {**{kind: kind for kind in STATE_KINDS}, REST: "rest of the peak"}
FARTHEST_LIMIT = 4.0
"""Times the largest peak; a limit beyond it is told, since its line would make the bars short."""
MEMORY_TITLE = "peak memory of a rank, MB"


def memory_picture(comparison: Comparison) -> Picture | None:
    """None where no peak was measured."""
    known = [group for group in comparison.groups if group.rank_peaks]
    drawn = drawable(known)
    if not drawn:
        return None
    peaks = [_peak_of(group) for group in drawn]
    limit = min((limit for group in drawn if (limit := _limit_of(group)) is not None), default=None)
    near = limit is not None and limit <= FARTHEST_LIMIT * max(peaks)
    cut = cut_at(peaks)
    rows = [row for group in drawn for row in _memory_parts(group, known, near, cut)]
    ends = [row for row in rows if row["kind"] == LABELS[REST]]
    text = prose("memory_picture")
    if any(row["expected"] is not None for row in ends):
        text += " Marks: states expected in closed form."
    if limit is not None:
        text += f" Device limit: {number(limit)} MB."
    if cut is not None:
        text += f" Bars are cut at {number(cut)} MB."
    return Picture(
        key="memory",
        caption=caption(text, drawn, known),
        alt=f"Bars: {MEMORY_TITLE}, and model states. {told(ends)}.",
        chart=lambda: _memory_chart(rows, limit if near else None),
    )


def _peak_of(group: CellRuns) -> float:
    """In MB, as all figures of a bar."""
    return max(group.rank_peaks) / 1e6


def _limit_of(group: CellRuns) -> float | None:
    record = group.record
    predicted = record.prediction.device_limit_bytes if record.prediction else None
    limit = record.world.memory_limit_bytes or predicted
    return None if limit is None else limit / 1e6


def _memory_parts(group: CellRuns, groups: Sequence[CellRuns], near: bool, cut: float | None) -> list[Row]:
    """A row for each kind; the last, which is always there, holds what belongs to the cell."""
    kinds, peak = quantities.kinds_at(group.record, "after_backward"), _peak_of(group)
    states = {kind: kinds[kind] / 1e6 for kind in STATE_KINDS if kinds.get(kind)}
    held, end = sum(states.values()), peak if cut is None else min(peak, cut)
    text = f"{number(peak)} MB" + (f", states {number(held)}" if states else "")
    of_cell = {
        "peak": peak,
        "end": end,
        "expected": _expected_states(group),
        "limit": _limit_of(group) if near else None,
        "text": text + (" (bar cut)" if end < peak else ""),
    }
    return [
        cell_row(
            group, groups, kind=LABELS[kind], megabytes=size, order=list(KINDS).index(kind),
            **(of_cell if kind == REST else dict.fromkeys(of_cell)),
        )
        for kind, size in {**states, REST: max(0.0, end - held)}.items()
    ]  # fmt: skip


def _expected_states(group: CellRuns) -> float | None:
    """Closed form of the model states on the device, of the rank that holds most."""
    states = largest(rank_states(group.record))
    if states is None or states.expected is None:
        return None
    kinds = states.expected.kinds(host=False)
    return sum(kinds.get(kind, 0) for kind in STATE_KINDS) / 1e6


def _memory_chart(rows: Sequence[Row], limit: float | None) -> Spec:
    used = {row["kind"] for row in rows}
    colours = {LABELS[kind]: colour for kind, colour in KINDS.items() if LABELS[kind] in used}
    layers = [stack("megabytes", MEMORY_TITLE, "kind", colours), tick("expected"), text_after("end")]
    if limit is not None:
        at = {**quantity("limit"), "aggregate": "min"}
        layers += layer("device_limit", x=at, text=f"device limit {number(limit)} MB")
    return bar_chart(rows, layers)


NEGLIGIBLE = 0.005
"""Relative difference below which two volumes are written as equal."""


def volume_picture(comparison: Comparison) -> Picture | None:
    """None where nobody sent anything."""
    known = [group for group in comparison.groups if group.median(SENT)]
    drawn = drawable(known)
    if not drawn:
        return None
    rows = [_volume_row(group, known) for group in drawn]
    title = "sent by a rank per step, MB (ring algorithm)"
    text = "Marks: the textbook (ZeRO paper)."
    judged = [row for row in rows if row["expected"] is not None]
    if any(row["unexpected"] is not None for row in rows):
        text += " Red: bytes expected of the implementation, where it sent others."
    elif judged and len(judged) < len(rows):
        text += f" {len(judged)} of {len(rows)} cells have an expected volume, and sent it."
    elif judged:
        text += " Every cell sent the bytes expected of its implementation."
    layers = [bar("megabytes", title), tick("textbook"), tick("unexpected", colour=LIMIT), text_after("end")]
    return Picture(
        key="communication",
        caption=caption(f"Bytes that a rank sends per step. {text}", drawn, known),
        alt=f"Bars: {title}. {told(rows)}.",
        chart=lambda: bar_chart(rows, layers),
    )


def _volume_row(group: CellRuns, groups: Sequence[CellRuns]) -> Row:
    sent = group.median(SENT) or 0.0
    textbook, expected = group.median(TEXTBOOK_SENT), group.median(EXPECTED_SENT)
    text = f"{number(sent / 1e6)} MB"
    if textbook and not _equal_volumes(sent, textbook):
        text += f" = {short(round(sent / textbook, 2))} x textbook"
    unexpected = expected is not None and not _equal_volumes(sent, expected)
    if expected is not None and unexpected:
        text += f", {number(expected / 1e6)} expected"
    known = [value for value in (sent, textbook, expected) if value is not None]
    return cell_row(
        group, groups, megabytes=sent / 1e6, text=text, end=max(known) / 1e6,
        textbook=None if textbook is None else textbook / 1e6,
        expected=None if expected is None else expected / 1e6,
        unexpected=expected / 1e6 if expected is not None and unexpected else None,
    )  # fmt: skip


def _equal_volumes(value: float, other: float) -> bool:
    return abs(value - other) <= NEGLIGIBLE * abs(other)


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
        return max(map(abs, self.differences.values()), default=0.0)


def loss_lines(comparison: Comparison) -> list[LossLine]:
    """Line of every cell with a finite loss, in their order."""
    groups = comparison.groups
    references = {
        group.record.job_id: _loss_curve(row.record for row in group.rows)
        for group in reversed(groups)
        if group.judges_others
    }
    lines = []
    for group in groups:
        losses = _loss_curve(row.record for row in group.rows)
        expected = {} if group.judges_others else references.get(group.record.job_id, {})
        cut = [r.record for row in group.rows if (r := row.reference) is not None and is_variant(r.record)]
        if cut:
            expected = _loss_curve(cut)
        if losses:
            differences = {step: loss - expected[step] for step, loss in losses.items() if step in expected}
            lines.append(LossLine(group=group, losses=losses, differences=differences))
    return lines


def _loss_curve(records: Iterable[Record]) -> Curve:
    """Median loss of each step over the repeats that reached it with a finite loss."""
    found = grouped(
        (step.step, step.loss) for record in records for step in record.steps if step.loss is not None
    )
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
    every, unit = _loss_rows(lines), min((loss_unit(line.group.record) for line in lines), key=len)
    jobs = list(dict.fromkeys(row["job"] for row in every))
    width, of_jobs = NARROW if len(jobs) > 1 else WIDTH, []
    for job in jobs:
        rows = [row for row in every if row["job"] == job]
        judged = [row for row in rows if row["differences"]]
        steps = [step for row in rows for step in row["steps"]]
        losses = _losses(rows, x_channel(steps, titled=not judged), unit)
        panels = [{"width": width, "height": UPPER, "layer": losses}]
        if judged:
            differences = _differences(judged, x_channel(steps, titled=True), unit)
            panels.append({"width": width, "height": LOWER, "layer": differences})
        chart: Spec = {"vconcat": panels, "spacing": 10}
        if len(jobs) > 1:
            chart |= {"title": job, "transform": [{"filter": {"field": "job", "equal": job}}]}
        of_jobs.append(chart)
    charts = {"hconcat": of_jobs, "spacing": 28} if len(jobs) > 1 else of_jobs[0]
    return {"data": {"values": every}, **charts}


def _loss_rows(lines: Sequence[LossLine]) -> list[Row]:
    """One for each cell; its curves are lists, which the specification lays out."""
    groups = [line.group for line in lines]
    steps = sorted({step for line in lines for step in line.losses})
    most = min(MOST_STEPS, max(LEAST_STEPS, MOST_POINTS // len(lines)))
    stride = ceil(len(steps) / most)
    drawn = {*steps[::stride], *steps[-1:]}
    # '2 ranks, job 012345' by the job's id; the reference, on one process, counts where it is alone.
    sizes: dict[str, set[int]] = {}
    for group in sorted(groups, key=lambda group: group.is_reference):
        of_job = sizes.setdefault(group.record.job_id, set())
        if not (group.is_reference and of_job):
            of_job.add(group.world_size)
    job_names = {job: f"{ranks(*sorted(of_job))}, job {job[:6]}" for job, of_job in sizes.items()}
    rows = []
    for line in lines:
        of_line = [step for step in sorted(line.losses) if step in drawn] or sorted(line.losses)[-1:]
        differences = [_rounded(line.differences.get(step), DIFFERENCE_DIGITS) for step in of_line]
        rows.append(
            cell_row(
                line.group, [line.group], verdict=line.verdict, job=job_names[line.group.record.job_id],
                is_compared=int(not line.group.judges_others),
                limit=limits.loss if (limits := line.group.limits) else None, steps=of_line,
                losses=[_rounded(line.losses[step], DIGITS) for step in of_line],
                differences=differences if line.differences else [],
            )
        )  # fmt: skip
    return rows


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _losses(rows: Sequence[Row], x: Spec, unit: str) -> list[Spec]:
    values = [loss for row in rows for loss in row["losses"]]
    margin = 0.04 * (max(values) - min(values) or abs(max(values)) or 1.0)
    low, high = min(values) - margin, max(values) + margin
    scale = {"domain": [low, high], "nice": False, "zero": False}
    _place_names(rows, "losses", lambda loss: UPPER * (1 - (loss - low) / (high - low)), UPPER)
    axis = {"tickCount": 5, "minExtent": EXTENT}
    y = partial(channel, title=", ".join(filter(None, ("loss", unit))), scale=scale, axis=axis)
    return [*band_of(x, y, "losses"), layer("band_name")]


def _differences(rows: Sequence[Row], x: Spec, unit: str) -> list[Spec]:
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
    said = (unit, "log beyond limit" if "type" in scale else "")

    def height(value: float) -> float:
        share = _symlog(value, limit) / _symlog(top, limit) if "type" in scale else value / top
        return LOWER / 2 * (1 - share)

    _place_names(rows, "differences", height, LOWER)
    y = partial(
        channel,
        title=[*filter(None, ("minus reference", ", ".join(filter(None, said))))],
        scale=scale,
        axis=axis,
    )
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
    drawn = _drawn_lines(lines)
    limits = sorted({
        limits.loss for line in lines if line.differences and (limits := line.group.limits) is not None
    })  # fmt: skip
    outliers = [line for line in lines if line.verdict == "diverged"]
    agreeing = [line for line in lines if line.verdict == "agrees"]
    text = "Loss over steps, medians over runs; shaded: all cells that agree."
    if any(line.differences for line in lines):
        text += " Below: difference to the reference"
        text += (
            f", shaded within the limit {listed([scientific(limit) for limit in limits])}." if limits else "."
        )
    if len(drawn) < len(lines):
        text += f" Drawn: {len(drawn)} of {len(lines)} cells, those furthest from their reference first."
    return Picture(
        key="loss",
        caption=text,
        alt=_loss_alt(lines, agreeing, outliers),
        chart=lambda: loss_chart(drawn),
    )


def _drawn_lines(lines: Sequence[LossLine]) -> list[LossLine]:
    """Lines of the first jobs, of diverged ones those that diverged the furthest, in their order."""
    jobs = list(dict.fromkeys(line.group.record.job_id for line in lines))[:MOST_JOBS]
    of_jobs = [line for line in lines if line.group.record.job_id in jobs]
    outliers = [line for line in of_jobs if line.verdict == "diverged"]
    outliers.sort(key=lambda line: -line.largest)
    left_out = {id(line) for line in outliers[MOST_OUTLIERS:]}
    return [line for line in of_jobs if id(line) not in left_out]


def _loss_alt(lines: Sequence[LossLine], agreeing: Sequence[LossLine], outliers: Sequence[LossLine]) -> str:
    first, last = (pick(lines[0].losses) for pick in (min, max))
    parts = [
        f"Loss over steps {first} to {last}: {number(lines[0].losses[first])} to "
        f"{' '.join(filter(None, (number(lines[0].losses[last]), loss_unit(lines[0].group.record))))} "
        f"for {lines[0].group.label}."
    ]
    if compared := [line for line in agreeing if not line.group.judges_others]:
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
PANELS = list(dict.fromkeys(name.partition("-")[0] for name, _ in FAMILY_COLOURS.values()))
"""The stages of ZeRO share one."""
Curves = Sequence[Sequence[ScalingPoint]]


def strong_picture(curves: Curves) -> Picture | None:
    """Speed-up of one job, of many curves those of the shortest steps."""
    return _scaling_picture("strong-scaling", prose("strong_picture"), curves, strong=True)


def weak_picture(curves: Curves) -> Picture | None:
    """Efficiency of jobs that grow with the ranks."""
    return _scaling_picture("weak-scaling", prose("weak_picture"), curves, strong=False)


def _scaling_picture(key: str, text: str, curves: Curves, *, strong: bool) -> Picture | None:
    if not curves:
        return None
    if any(point.ratio.extent for curve in curves for point in curve):
        text += f" Vertical lines: {percent(LEVEL)} interval of the ratio in the same round."
    shortest = sorted(curves, key=lambda curve: curve[-1].step_seconds)[:MOST_CURVES]
    drawn = [curve for curve in curves if curve in shortest]
    if len(drawn) < len(curves):
        text += " " + prose("scaling_drawn", drawn=len(drawn), all=len(curves))
    last = [curve[-1] for curve in drawn]
    ends = [f"{p.curve} {_scaling_text(p, strong)} on {ranks(p.group.world_size)}" for p in last]
    what = "Speed-up" if strong else "Weak-scaling efficiency"
    return Picture(
        key=key, caption=text, alt=f"{what} over the number of ranks. {listed(ends, MOST_NAMED)}.",
        chart=lambda: _scaling_chart(drawn, strong),
    )  # fmt: skip


def _scaling_text(point: ScalingPoint, strong: bool) -> str:
    return f"{times(point.speed_up)} x" if strong else percent(point.weak_efficiency)


def _scaling_chart(curves: Curves, strong: bool) -> Spec:
    rows = _scaling_rows(curves, strong)
    many = len(curves) > MOST_IN_ONE
    panel = _panel(rows, strong, (260, 210) if many else (460, 340))
    families = grouped((row["panel"] if many else "", row) for row in rows)
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
                label=f"{name} {_scaling_text(point, strong)}" if point is last else None,
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
    rows = [_trade_off_row(group, drawn, order, peaks, cut, group.label in best) for group in drawn]
    base = bases_words([order])
    titles = (f"peak memory of a rank, % of {base}", f"throughput, % of {base} on the same ranks")
    words = f"Dashed: Pareto frontier, each step shown to be faster: {listed(best, len(best))}."
    if not order.is_judged:
        words = f"No frontier is drawn ({unranked_words(order)})."
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


def _trade_off_row(
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

    def channels(self, x: str, y: str, titles: tuple[str, str]) -> Spec:
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


def _trade_off_chart(rows: Sequence[Row], titles: tuple[str, str]) -> Spec:
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
    rows = [_throughput_row(group, known, shown[group.place]) for group in drawn]
    lines = f"Lines: {percent(LEVEL)} interval of the ratio in the same round."
    if not any(order.is_judged for order in shown.values()):
        lines = f"Fewer than {interval_runs()} rounds: no interval is known, and no order."
    text = f"Throughput relative to {bases_words(shown.values())}, median over rounds. {lines}"
    layers = [bar("value", title), interval("low", "high"), text_after("end")]
    return Picture(
        key="throughput",
        caption=caption(text, drawn, known),
        alt=f"Bars: {title}. {told(rows)}.",
        chart=lambda: bar_chart(rows, layers),
    )


def _throughput_row(group: CellRuns, groups: Sequence[CellRuns], order: Ranking) -> Row:
    rate = group.median(SPEED) or 0.0
    ratio = order.ratio(group.label, order.base)
    value, extent = 100 * (ratio.middle or 0.0), None if group.label == order.base else ratio.extent
    low, high = (100 * extent.low, 100 * extent.high) if extent else (None, None)
    text = f"{value:.0f} %"
    if group.label == order.base:
        text = f"{text} = {rate_text(group.record, rate)}"
    return cell_row(
        group, groups, tokens_per_second=rate, value=value, low=low, high=high,
        end=max(value, high or 0.0), text=text, runs=len(group.values(SPEED)),
    )  # fmt: skip
