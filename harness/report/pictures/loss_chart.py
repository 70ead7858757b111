"""The specification of the loss picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, copysign, floor, log1p, log10

from harness.judge.repeats import Repeats
from harness.judge.wording import ranks
from harness.report.pictures.cells import Row, cell_row
from harness.report.pictures.labels import spread
from harness.report.pictures.loss_layers import (
    Axis,
    Spec,
    band,
    band_name,
    limit_band,
    outliers,
    x_channel,
)
from harness.report.pictures.loss_lines import Line

MOST_STEPS, LEAST_STEPS, MOST_POINTS = 200, 20, 20_000
"""Of more steps, or more points of all cells together, every second, third, ... step is drawn."""
WIDTH, NARROW = 540, 300
UPPER, LOWER = 220, 150
EXTENT = 48
"""Pixels of the numbers at an upright axis, so that panels below each other are in line."""
DIGITS, DIFFERENCE_DIGITS = 6, 4


def loss_chart(lines: Sequence[Line]) -> Spec:
    """Two panels for each job: losses, and where there is a reference their differences to it."""
    rows = _rows(lines)
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    of_jobs = [_job([row for row in rows if row["job"] == job], job, len(jobs) > 1) for job in jobs]
    panels = {"hconcat": of_jobs, "spacing": 28} if len(jobs) > 1 else of_jobs[0]
    return {"data": {"values": rows}, **panels}


def _job(rows: Sequence[Row], job: str, is_one_of_several: bool) -> Spec:
    width = NARROW if is_one_of_several else WIDTH
    panels = [{"width": width, "height": UPPER, "layer": _losses(rows)}]
    judged = [row for row in rows if row["differences"]]
    if judged:
        panels.append({"width": width, "height": LOWER, "layer": _differences(judged)})
    chart: Spec = {"vconcat": panels, "spacing": 10}
    if is_one_of_several:
        chart |= {"title": job, "transform": [{"filter": {"field": "job", "equal": job}}]}
    return chart


def _rows(lines: Sequence[Line]) -> list[Row]:
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
                limit=line.limit, steps=of_line,
                losses=[_rounded(line.losses[step], DIGITS) for step in of_line],
                differences=differences if line.differences else [],
            )
        )  # fmt: skip
    return rows


def _job_names(groups: Sequence[Repeats]) -> dict[str, str]:
    """'2 ranks, job 012345' by the job's id; the reference, on one process, counts where it is alone."""
    sizes: dict[str, set[int]] = {}
    for group in sorted(groups, key=lambda group: group.is_reference):
        found = sizes.setdefault(group.record.job_id, set())
        if not (group.is_reference and found):
            found.add(group.world_size)
    return {job: f"{ranks(*sorted(of_job))}, job {job[:6]}" for job, of_job in sizes.items()}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _losses(rows: Sequence[Row]) -> list[Spec]:
    values = [loss for row in rows for loss in row["losses"]]
    margin = 0.04 * (max(values) - min(values) or abs(max(values)) or 1.0)
    low, high = min(values) - margin, max(values) + margin
    scale = {"domain": [low, high], "nice": False, "zero": False}
    _place_names(rows, "losses", lambda loss: UPPER * (1 - (loss - low) / (high - low)), UPPER)
    y = Axis("loss, nats per token", scale, {"tickCount": 5, "minExtent": EXTENT})
    x = x_channel(titled=not any(row["differences"] for row in rows))
    return [band(x, y, "losses"), *outliers(x, y, "losses"), band_name()]


def _differences(rows: Sequence[Row]) -> list[Spec]:
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
    y = Axis("minus reference", scale, axis)
    x = x_channel(titled=True)
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
