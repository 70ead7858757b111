"""Layers of the loss picture: the band of cells that agree, each cell that does not, and the limit.

All take rows of one job with the lists `steps`, `losses` and `differences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.report.palette import GREY, LIMIT, VERDICTS
from harness.report.pictures.bars import as_given
from harness.report.pictures.curves import NAME

Spec = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """The upright axis of a panel."""

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


def x_channel(*, titled: bool) -> Spec:
    axis = {"format": "d", "tickMinStep": 1, "grid": False, "tickCount": 10}
    scale = {"nice": False, "zero": False}
    title = "optimizer step" if titled else None
    return {"field": "step", "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def _flat(field: str) -> list[Spec]:
    """A row for each step, with its value under `value`."""
    return [
        {"filter": f"datum.{field}.length > 0"},
        {"flatten": ["steps", field], "as": ["step", "value"]},
        {"filter": "isValid(datum.value)"},
    ]


def _span(field: str) -> list[Spec]:
    """Least and most of each step over the cells of one verdict."""
    spans = [
        {"op": "min", "field": "value", "as": "least"},
        {"op": "max", "field": "value", "as": "most"},
    ]
    return [
        {"filter": "datum.verdict != 'diverged'"},
        *_flat(field),
        {"aggregate": spans, "groupby": ["step", "verdict"]},
    ]


def band(x: Spec, y: Axis, field: str) -> Spec:
    scale = {"domain": list(VERDICTS), "range": list(VERDICTS.values())}
    colour = {"field": "verdict", "type": "nominal", "scale": scale, "legend": None}
    return {
        "transform": _span(field),
        "mark": {"type": "area", "fillOpacity": 0.45, "strokeWidth": 3},
        "encoding": {
            "x": x, "y": y.of("least"), "y2": {"field": "most"}, "fill": colour, "stroke": colour,
        },
    }  # fmt: skip


def band_name() -> Spec:
    """How many cells the band stands for, at its end."""
    counted = [
        {"op": "distinct", "field": "cell", "as": "cells"},
        {"op": "max", "field": "losses_label", "as": "place"},
    ]
    text = (
        "datum.cells + (datum.cells == 1 ? ' cell' : ' cells') "
        "+ (datum.verdict != 'agrees' ? ' not judged' : datum.cells == 1 ? ' agrees' : ' agree')"
    )
    return {
        "transform": [
            {"filter": "datum.verdict != 'diverged'"},
            {"aggregate": counted, "groupby": ["verdict"]},
            {"calculate": text, "as": "text"},
        ],
        "mark": {**NAME, "dx": 8},
        "encoding": {"x": {"value": "width"}, "y": _pixel("place"), "text": {"field": "text"}},
    }


def outliers(x: Spec, y: Axis, field: str) -> list[Spec]:
    """A line for each cell that diverged, with its name at the end."""
    diverged = {"filter": "datum.verdict == 'diverged'"}
    line = {
        "transform": [diverged, *_flat(field)],
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": x, "y": y.of("value"), "detail": {"field": "cell"}, "stroke": as_given("colour"),
            "strokeDash": as_given("dash"),
        },
    }  # fmt: skip
    name = {
        "transform": [diverged, {"calculate": "datum.cell + ' diverged'", "as": "text"}],
        "mark": {**NAME, "dx": 8},
        "encoding": {
            "x": {"value": "width"}, "y": _pixel(f"{field}_label"), "text": {"field": "text"},
            "color": as_given("colour"),
        },
    }  # fmt: skip
    return [line, name]


def _pixel(field: str) -> Spec:
    return {"field": field, "type": "quantitative", "scale": None}


def limit_band(y: Axis) -> list[Spec]:
    """What the level allows, around the reference."""
    both = [
        {"filter": "isValid(datum.limit)"},
        {"aggregate": [{"op": "max", "field": "limit", "as": "limit"}]},
        {"calculate": "-datum.limit", "as": "lower"},
        {"calculate": "'limit ' + format(datum.limit, '.1e')", "as": "text"},
    ]
    line = {"type": "rule", "color": LIMIT, "strokeDash": [6, 3], "strokeWidth": 1.5}
    name = {"type": "text", "color": LIMIT, "align": "left", "baseline": "bottom", "dx": 6, "dy": -2}
    return [
        {
            "transform": both,
            "mark": {"type": "rect", "color": GREY, "opacity": 0.2},
            "encoding": {"y": y.of("limit"), "y2": {"field": "lower"}},
        },
        {"transform": both, "mark": line, "encoding": {"y": y.of("limit")}},
        {"transform": both, "mark": line, "encoding": {"y": y.of("lower")}},
        {
            "transform": both,
            "mark": name,
            "encoding": {"x": {"value": 0}, "y": y.of("limit"), "text": {"field": "text"}},
        },
    ]
