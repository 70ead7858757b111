"""Speed-up and efficiency over the number of ranks, with the ideal line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.judge.scaling import ScalingPoint
from harness.judge.statistics import LEVEL
from harness.judge.wording import listed, ranks
from harness.tell.document import Picture
from harness.tell.formats import percent, times
from harness.tell.pictures.bars import MOST_NAMED, cell_row, drawn_name
from harness.tell.pictures.curves import Panel
from harness.tell.pictures.drawing import FAMILIES, Row, layer, look_of_record

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
    text = (
        "Strong scaling: speed-up over the smallest number of ranks, or over the reference where a backend "
        "did not run on one. Dashed: ideal."
    )
    return _picture("strong-scaling", text, curves, strong=True)


def weak_picture(curves: Curves) -> Picture | None:
    """Efficiency of jobs that grow with the ranks."""
    text = (
        "Weak scaling: efficiency, the time on the smallest number of ranks over the time. Dashed: ideal, "
        "100 %."
    )
    return _picture("weak-scaling", text, curves, strong=False)


def _picture(key: str, text: str, curves: Curves, *, strong: bool) -> Picture | None:
    if not curves:
        return None
    if any(point.ratio.extent for curve in curves for point in curve):
        text += f" Vertical lines: {percent(LEVEL)} interval of the ratio in the same round."
    shortest = sorted(curves, key=lambda curve: curve[-1].step_seconds)[:MOST_CURVES]
    drawn = [curve for curve in curves if curve in shortest]
    if len(drawn) < len(curves):
        text += (
            f" Drawn: {len(drawn)} of {len(curves)}, those with the shortest median step; the table has all."
        )
    ends = [
        f"{curve[-1].curve} {_text(curve[-1], strong)} on {ranks(curve[-1].group.world_size)}"
        for curve in drawn
    ]
    what = "Speed-up" if strong else "Weak-scaling efficiency"
    return Picture(
        key=key,
        caption=text,
        alt=f"{what} over the number of ranks. {listed(ends, MOST_NAMED)}.",
        chart=lambda: _chart(drawn, strong),
    )


def _text(point: ScalingPoint, strong: bool) -> str:
    return f"{times(point.speed_up)} x" if strong else percent(point.weak_efficiency)


def _chart(curves: Curves, strong: bool) -> dict[str, Any]:
    rows = _rows(curves, strong)
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


def _rows(curves: Curves, strong: bool) -> list[Row]:
    several = len({curve[-1].group.record.job_id for curve in curves}) > 1 and strong
    groups = [point.group for curve in curves for point in curve]
    least = min(point.base.world_size for curve in curves for point in curve)
    rows = []
    for index, curve in enumerate(curves):
        last = curve[-1]
        job = f", job {last.group.record.job_id[:6]}" if several else ""
        name = drawn_name(last.curve, [each[-1].curve for each in curves]) + job
        # The reference may be the first point of a curve: it is drawn as the curve is.
        look = look_of_record(last.group.record)
        for point in curve:
            extent, unit = point.ratio.extent, 1 if strong else 100
            row = cell_row(
                point.group, groups, curve=index, x=point.group.world_size,
                value=point.speed_up if strong else 100 * point.weak_efficiency,
                label=f"{name} {_text(point, strong)}" if point is last else None,
                low=unit * extent.low if extent else None, high=unit * extent.high if extent else None,
                beside=point.group.world_size * (1 - BESIDE * (index + 1)),
                ideal=point.group.world_size / least if strong else 100.0,
                panel=look.family.partition("-")[0],
            )  # fmt: skip
            rows.append(row | look.fields())
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
