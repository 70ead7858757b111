"""Loss over steps, and below it the difference to the reference: cells that agree as a band, others named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, copysign, floor, log1p, log10
from statistics import median
from typing import Any

from harness.judge.agreement.noise import is_variant
from harness.judge.comparison import Comparison
from harness.judge.repeats import CellRuns
from harness.judge.wording import counted, listed, ranks
from harness.record import Record
from harness.tell.document import Picture
from harness.tell.formats import number, scientific
from harness.tell.pictures.bars import MOST_NAMED, cell_row
from harness.tell.pictures.curves import spread
from harness.tell.pictures.drawing import VERDICTS, Row, layer

Spec = dict[str, Any]


@dataclass(frozen=True)
class VerticalAxis:
    """The vertical axis of a panel."""

    title: str
    scale: Spec
    axis: Spec

    def of(self, field: str) -> Spec:
        return {
            "field": field,
            "type": "quantitative",
            "title": self.title,
            "scale": self.scale,
            "axis": self.axis,
        }


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


def band(x: Spec, y: VerticalAxis, field: str) -> Spec:
    """From the least to the most of each step over the cells of one verdict."""
    verdicts = {"verdicts": list(VERDICTS), "colours": list(VERDICTS.values())}
    found: Spec = layer("band", x=x, least=y.of("least"), field=field, **verdicts)
    return found


def outliers(x: Spec, y: VerticalAxis, field: str) -> list[Spec]:
    """A line for each cell that diverged, with its name at the end."""
    return list(layer("outliers", x=x, y=y.of("value"), field=field))


def limit_band(y: VerticalAxis) -> list[Spec]:
    """What the level allows, around the reference."""
    return list(layer("limit_band", limit=y.of("limit"), lower=y.of("lower")))


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
    rows = _rows(lines)
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    of_jobs = [_job([row for row in rows if row["job"] == job], job, len(jobs) > 1) for job in jobs]
    panels = {"hconcat": of_jobs, "spacing": 28} if len(jobs) > 1 else of_jobs[0]
    return {"data": {"values": rows}, **panels}


def _job(rows: Sequence[Row], job: str, is_one_of_several: bool) -> Spec:
    width = NARROW if is_one_of_several else WIDTH
    judged = [row for row in rows if row["differences"]]
    steps = [step for row in rows for step in row["steps"]]
    panels = [{"width": width, "height": UPPER, "layer": _losses(rows, x_channel(steps, titled=not judged))}]
    if judged:
        x = x_channel(steps, titled=True)
        panels.append({"width": width, "height": LOWER, "layer": _differences(judged, x)})
    chart: Spec = {"vconcat": panels, "spacing": 10}
    if is_one_of_several:
        chart |= {"title": job, "transform": [{"filter": {"field": "job", "equal": job}}]}
    return chart


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
    y = VerticalAxis("loss, nats per token", scale, {"tickCount": 5, "minExtent": EXTENT})
    return [band(x, y, "losses"), *outliers(x, y, "losses"), layer("band_name")]


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
    y = VerticalAxis("minus reference", scale, axis)
    return [*limit_band(y), band(x, y, "differences"), *outliers(x, y, "differences")]


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
