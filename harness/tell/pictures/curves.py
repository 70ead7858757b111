"""Curves over a logarithmic axis, each named at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, log2, log10
from typing import Any

from harness.tell.pictures.drawing import CURVES, NATIVE_OPACITY, layer

LINE = 14.0
"""Height of a line of text."""
LETTER = 6.4
"""Width of a letter, on the average."""
NEAREST, FARTHEST = 11.0, 70.0
"""How far from its point the middle of a label's edge may lie."""
POINT = 7.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """Where a text stands: left edge, middle of its height, width."""

    left: float
    middle: float
    width: float

    def covers(self, other: Box) -> bool:
        """Whether two texts overlap."""
        return (
            abs(self.middle - other.middle) < LINE
            and self.left < other.left + other.width
            and other.left < self.left + self.width
        )

    def holds(self, point: Point) -> bool:
        """Whether a mark at this point would lie under the text."""
        x, y = point
        return (
            abs(self.middle - y) < LINE / 2 + POINT - 2
            and self.left - POINT < x < self.left + self.width + POINT
        )


def along(corners: Sequence[Point]) -> list[Point]:
    """Points along a line through these corners, close enough that no text fits between them."""
    found = list(corners[:1])
    for (x0, y0), (x1, y1) in pairwise(corners):
        steps = int(max(abs(x1 - x0), abs(y1 - y0)) / LINE) + 1
        found += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(1, steps + 1)]
    return found


def spread(places: Sequence[float], low: float, high: float, gap: float = LINE) -> list[float]:
    """The places moved apart to at least `gap`, in their order, within bounds if they fit.

    Neighbours that collide share the way: each group lies around the mean of its places.
    """
    groups: list[tuple[float, list[int]]] = []

    def middle_of(members: list[int]) -> float:
        half = gap * (len(members) - 1) / 2
        mean = sum(places[index] for index in members) / len(members)
        return min(max(mean, low + half), max(high - half, low + half))

    for index in sorted(range(len(places)), key=lambda i: places[i]):
        members = [index]
        while groups and middle_of(members) - groups[-1][0] < gap * (len(groups[-1][1]) + len(members)) / 2:
            members = groups.pop()[1] + members
        groups.append((middle_of(members), members))
    found = [0.0] * len(places)
    for middle, members in groups:
        for rank, index in enumerate(members):
            found[index] = middle + gap * (rank - (len(members) - 1) / 2)
    return found


def beside(
    points: Sequence[Point], texts: Sequence[str], width: float, height: float, lines: Sequence[Point] = ()
) -> list[Box]:
    """A box for the text of each point: the nearest free place around it, within the panel.

    `lines`: points along lines that texts should not lie on. Where nothing is free, the place with the
    fewest overlaps.
    """
    boxes: list[Box] = []
    for point, text in zip(points, texts, strict=True):
        candidates = _around(point, LETTER * len(text), width, height)

        def cost(box: Box) -> int:
            crossed = any(map(box.holds, lines))
            return sum(map(box.covers, boxes)) * 4 + sum(map(box.holds, points)) * 2 + crossed

        boxes.append(min(candidates, key=cost))
    return boxes


def _around(point: Point, wide: float, width: float, height: float) -> list[Box]:
    """Places to the right and left, above and below, nearer ones first; inside the panel if any is."""
    x, y = point
    steps = [0.0]
    while steps[-1] < FARTHEST:
        steps.append(steps[-1] + LINE / 2)
    found = []
    for up in steps:
        for dy in (-up, up) if up else (0.0,):
            gap = NEAREST if up < LINE else 4.0
            found += [Box(x + gap, y + dy, wide), Box(x - gap - wide, y + dy, wide)]
            if up >= LINE:
                found.append(Box(x - wide / 2, y + dy, wide))
    found.sort(key=lambda box: _distance(box, point))
    inside = [b for b in found if b.left >= 0 and b.left + b.width <= width and 0 <= b.middle <= height]
    return inside or found


def _distance(box: Box, point: Point) -> float:
    x, y = point
    across = max(box.left - x, x - box.left - box.width, 0.0)
    return across + abs(box.middle - y)


LEFT = 1.06
"""Factor between the least across and the left edge."""
Spec = dict[str, Any]
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
    """Of the vertical axis."""
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

    def chart(self, rows: Sequence[Spec], xs: Sequence[float]) -> Spec:
        """The panel by itself, with its rows."""
        self.place_labels(rows)
        return {
            "data": {"values": rows}, "width": self.width, "height": self.height, "layer": self.layers(xs),
        }  # fmt: skip

    def layers(self, xs: Sequence[float]) -> list[Spec]:
        """Lines, points and names; `xs`: every value across, in rising order."""
        x = self.x(xs)
        of_names = {"x_of_names": {**x, "field": "last"}, "y_of_names": self.y("label_y")}
        return list(layer("curves", x=x, y=self.y("value"), **of_names))

    def x(self, xs: Sequence[float]) -> Spec:
        """The channel across."""
        scale = {"type": "log", "base": 2, "domain": [xs[0] / LEFT, xs[-1]], "nice": False}
        axis = {"values": list(xs), "grid": False, "labelOverlap": True, **self.x_axis}
        return {"field": "x", "type": "quantitative", "title": self.across, "scale": scale, "axis": axis}

    def y(self, name: str) -> Spec:
        """A vertical channel."""
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
