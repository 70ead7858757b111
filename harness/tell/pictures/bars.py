"""Horizontal bars, one for each cell, in a panel for each number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.tell.pictures.cells import Row
from harness.tell.pictures.drawing import GREY

Layer = dict[str, Any]
WIDTH = 520
"""Pixels of a panel, without the names to its left."""
STEP = 24
"""Pixels of a bar with the gap to the next."""


def bar_chart(rows: Sequence[Row], layers: Sequence[Layer]) -> dict[str, Any]:
    """Panels under each other; rows carry `place` and `name` and are drawn in their order."""
    header = {"labelOrient": "top", "labelAnchor": "start", "labelPadding": 4, "title": None}
    return {
        "data": {"values": list(rows)},
        "facet": {"row": {"field": "place", "type": "nominal", "sort": None, "header": header}},
        "spacing": 12,
        "spec": {
            "width": WIDTH,
            "height": {"step": STEP},
            "encoding": {"y": {"field": "name", "type": "nominal", "sort": None, "title": None}},
            "layer": list(layers),
        },
        "resolve": {"scale": {"y": "independent"}},
    }


def bar(field: str, title: str) -> Layer:
    """One bar from zero, in the colour of its family."""
    return {
        "mark": {"type": "bar", "height": {"band": 0.68}, "strokeWidth": 1.2},
        "encoding": {
            "x": quantity(field, title),
            "fill": as_given("colour"),
            "stroke": as_given("colour"),
            "fillOpacity": as_given("opacity"),
        },
    }


def stack(field: str, title: str, by: str, colours: Mapping[str, str]) -> Layer:
    """Bars cut into parts: a row each, with `field`, the name under `by` and the place under `order`."""
    return {
        "mark": {"type": "bar", "height": {"band": 0.68}, "stroke": GREY, "strokeWidth": 0.5},
        "encoding": {
            "x": {**quantity(field, title), "stack": "zero"},
            "fill": {
                "field": by,
                "type": "nominal",
                "scale": {"domain": list(colours), "range": list(colours.values())},
                "legend": {"orient": "top", "title": None, "direction": "horizontal", "columns": 0},
            },
            "order": {"field": "order", "type": "quantitative"},
        },
    }


def interval(low: str, high: str) -> Layer:
    """A line between two fields, over the bar."""
    return {
        "mark": {"type": "rule", "strokeWidth": 2.5},
        "transform": [{"filter": f"isValid(datum.{low})"}],
        "encoding": {"x": quantity(low), "x2": {"field": high}, "color": as_given("colour")},
    }


def text_after(field: str, text: str = "text") -> Layer:
    """Text to the right of a place."""
    return {
        "mark": {"type": "text", "align": "left", "baseline": "middle", "dx": 6, "fontWeight": "bold"},
        "encoding": {"x": quantity(field), "text": {"field": text}},
    }


def tick(field: str, *, colour: str = GREY) -> Layer:
    """A vertical mark that is higher than the bar."""
    return {
        "mark": {"type": "tick", "thickness": 2.5, "size": STEP - 2, "color": colour, "opacity": 1},
        "transform": [{"filter": f"isValid(datum.{field})"}],
        "encoding": {"x": quantity(field)},
    }


def quantity(field: str, title: str | None = None) -> dict[str, Any]:
    """A channel with a number, from zero."""
    named = {"title": title} if title is not None else {}
    scale, axis = {"zero": True}, {"tickCount": 6}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis, **named}


def as_given(field: str) -> dict[str, Any]:
    """A channel whose values are in the rows."""
    kind = "quantitative" if field == "opacity" else "nominal"
    return {"field": field, "type": kind, "scale": None, "legend": None}
