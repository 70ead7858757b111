"""Curves over a logarithmic axis, each named at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log2, log10
from typing import Any

from harness.report.palette import CURVES, NATIVE_OPACITY
from harness.report.pictures.bars import as_given
from harness.report.pictures.labels import spread

LEFT = 1.06
"""Factor between the least across and the left edge."""
Spec = dict[str, Any]
NAME = {"type": "text", "align": "left", "baseline": "middle", "fontWeight": "bold"}
"""The mark of a name to the right of a place."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes. Rows carry `x`, `value`, `curve`, and `label` at the last point of a curve.

    They also carry how they look: `colour`, `dash`, `shape` and `opacity`.
    """

    across: str
    """Title of the axis below."""
    up: str
    domain: tuple[float, float]
    """Of the upright axis."""
    is_log: bool
    width: int
    height: int
    x_axis: Mapping[str, Any] = field(default_factory=dict)
    y_axis: Mapping[str, Any] = field(default_factory=dict)

    def place_labels(self, rows: Sequence[Spec]) -> None:
        """Give the last row of each curve `label_y`, at which no name covers another, and `last`."""
        ends = [row for row in rows if row["label"] is not None]
        places = spread([self._pixel(row["value"]) for row in ends], 0, self.height)
        right = max((row["x"] for row in rows), default=None)
        for row in rows:
            row["last"], row["label_y"] = right, None
        for row, place in zip(ends, places, strict=True):
            row["label_y"] = self._value(place)

    def layers(self, xs: Sequence[float]) -> list[Spec]:
        """Lines, points and names; `xs`: every value across, in rising order."""
        x = self.x(xs)
        at_end = [{"filter": "isValid(datum.label_y)"}]
        look = {"fill": as_given("colour"), "stroke": as_given("colour"), "fillOpacity": as_given("opacity")}
        detail = {"detail": {"field": "curve"}, "stroke": as_given("colour"), "strokeDash": as_given("dash")}
        leader = {"x2": {"field": "last"}, "y2": {"field": "label_y"}}
        return [
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {"x": x, "y": self.y("value"), **detail},
            },
            {
                "transform": at_end,
                "mark": {"type": "rule", "strokeWidth": 0.8, "x2Offset": 14},
                "encoding": {"x": x, "y": self.y("value"), **leader},
            },
            {
                "mark": {"type": "point", "size": 60, "strokeWidth": 1.5, "opacity": 1},
                "encoding": {"x": x, "y": self.y("value"), **look, "shape": as_given("shape")},
            },
            {
                "transform": at_end,
                "mark": {**NAME, "dx": 16},
                "encoding": {
                    "x": {**x, "field": "last"}, "y": self.y("label_y"), "text": {"field": "label"},
                },
            },
        ]  # fmt: skip

    def x(self, xs: Sequence[float]) -> Spec:
        """The channel across."""
        scale = {"type": "log", "base": 2, "domain": [xs[0] / LEFT, xs[-1]], "nice": False}
        axis = {"values": list(xs), "grid": False, "labelOverlap": True, **self.x_axis}
        return {"field": "x", "type": "quantitative", "title": self.across, "scale": scale, "axis": axis}

    def y(self, name: str) -> Spec:
        """An upright channel."""
        kind = {"type": "log"} if self.is_log else {"zero": True}
        scale = {**kind, "domain": list(self.domain), "nice": False}
        axis = {"tickCount": 6, **self.y_axis}
        return {"field": name, "type": "quantitative", "title": self.up, "scale": scale, "axis": axis}

    def _pixel(self, value: float) -> float:
        """Below the upper edge."""
        low, high = self.domain
        share = log2(value / low) / log2(high / low) if self.is_log else (value - low) / (high - low)
        return self.height * (1 - share)

    def _value(self, pixel: float) -> float:
        low, high = self.domain
        share = 1 - pixel / self.height
        return float(low * (high / low) ** share) if self.is_log else low + share * (high - low)


def decades(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times a power of ten between two positive numbers, and the nearest outside."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low / 2.5 < tick < high * 2.5]


def plain_look(index: int) -> Spec:
    """Of the n-th curve that belongs to no family."""
    dash = ([1, 0], [6, 3], [2, 2])[index // len(CURVES) % 3]
    return {
        "colour": CURVES[index % len(CURVES)],
        "opacity": NATIVE_OPACITY,
        "dash": dash,
        "shape": SHAPES[index % len(SHAPES)],
    }
