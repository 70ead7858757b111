"""Pictures to SVG and PNG: a Vega-Lite specification in, one style for all, equal data give equal bytes.

Needs no network and no browser: vl-convert carries Vega, Vega-Lite and the fonts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from math import log2
from string import Template
from typing import Any

from harness.backends.strategy import StrategyKind
from harness.backends.yaml_values import parse_value
from harness.nested import mapped
from harness.safe_text import harmless
from harness.tell.document import Picture

Spec = dict[str, Any]
Row = dict[str, Any]


def _data(name: str) -> Spec:
    found: Spec = parse_value(files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return found


def _filled(part: Any, given: Spec) -> Any:
    def filled(text: Any) -> Any:
        if isinstance(text, str) and text[:1] == "$" and text[1:] in given:
            return given[text[1:]]
        return Template(text).safe_substitute(given) if isinstance(text, str) else text

    return mapped(part, filled)


_LOOKS = _filled(looks := _data("looks.yaml"), looks)
GREY, LIMIT, FAMILY_COLOURS, KINDS = (_LOOKS[name] for name in ("GREY", "LIMIT", "families", "kinds"))
ACTIVITIES, ALLOCATED, VERDICTS = (_LOOKS[name] for name in ("activities", "allocated", "verdicts"))
EXPOSED, COPIES_ALONE = "exposed communication", "copies alone"
NATIVE_OPACITY, WRAPPED_OPACITY = 0.62, 0.14


def look_of(strategy: StrategyKind | None) -> Row:
    """How a strategy is drawn in every picture, as fields of a row; None: one that nothing is known of.

    Through Accelerate it has the colour of what it wraps, but is only outlined, or dashed.
    """
    key, is_wrapped, sharding = "other", False, "unknown"
    if strategy is not None:
        key = strategy.family if strategy.zero_stage is None else f"zero{strategy.zero_stage}"
        is_wrapped, sharding = strategy.through_accelerate, strategy.sharding
    family, colour = FAMILY_COLOURS.get(key, FAMILY_COLOURS["other"])
    return {
        "family": family,
        "colour": colour,
        "opacity": WRAPPED_OPACITY if is_wrapped else NATIVE_OPACITY,
        "dash": [5, 3] if is_wrapped else [1, 0],
        "shape": _LOOKS["shapes"][sharding],
    }


RENDERER = "vl-convert-python"
VEGA_LITE = "5.21"
"""Version of Vega-Lite that draws."""
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
# Liberation Sans comes with the renderer and has the widths of Arial, which browsers have.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SIZE = 12


@cache
def _layers() -> Spec:
    return _data("layers.yaml")


def layer(name: str, **given: Any) -> Any:
    """A part of a specification from `layers.yaml`, with what is given for its names."""
    return _filled(_layers()[name], {"GREY": GREY, "LIMIT": LIMIT, "FONT": FONT, "SIZE": SIZE, **given})


PNG_SCALE = 2.0
_TAG = re.compile(r"<[^>]*>")
_FRACTION = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def renderer() -> str:
    """Name and version of what draws; another draws other bytes."""
    return f"{RENDERER} {version(RENDERER)}"


def channel(name: str, **named: Any) -> Spec:
    """A channel with a number: the field of that name, and what else the channel says."""
    return {"field": name, "type": "quantitative", **named}


def draw(picture: Picture, form: str = "svg", *, heading: str = "") -> bytes:
    """The picture as SVG, or as PNG on a white page, below a heading."""
    import vl_convert

    whole: Spec = {"$schema": SCHEMA, "description": picture.alt, "background": None, "padding": 8}
    whole |= {"title": heading} if heading else {}
    whole |= {**picture.chart(), "config": layer("config")}
    # Texts that XML can hold: vl-convert ends the process over others.
    whole = mapped(whole, lambda leaf: harmless(leaf) if isinstance(leaf, str) else leaf)
    svg = _svg(json.dumps(whole))
    if form == "svg":
        return f"{svg}\n".encode()
    # Of a PNG without a page vl-convert 1.9 writes half-transparent pixels too dark.
    page = '><rect width="100%" height="100%" fill="white"/>'
    image: bytes = vl_convert.svg_to_png(svg.replace(">", page, 1), scale=PNG_SCALE)
    return image


@lru_cache(maxsize=128)
def _svg(specification: str) -> str:
    """A report that is written and verified, or verified again, draws each picture once."""
    import vl_convert  # type: ignore[import-untyped, unused-ignore]

    drawn = vl_convert.vegalite_to_svg(specification, vl_version=VEGA_LITE, allowed_base_urls=[])
    # Coordinates of 0.01 pixel: without rounding noise and in fewer bytes.
    return _TAG.sub(lambda tag: _FRACTION.sub(_hundredths, tag[0]), drawn)


def _hundredths(number: re.Match[str]) -> str:
    rounded = f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if rounded == "-0" else rounded


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
    found.sort(key=lambda b: max(b.left - x, x - b.left - b.width, 0.0) + abs(b.middle - y))
    inside = [b for b in found if b.left >= 0 and b.left + b.width <= width and 0 <= b.middle <= height]
    return inside or found


LEFT = 1.06
"""Factor between the least across and the left edge."""


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
    places: tuple[str, ...] = ()
    """Names of 1, 2, 3, ... across; empty: the axis is logarithmic."""

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
        kind = {} if self.places else {"type": "log", "base": 2}
        scale = {**kind, "domain": [xs[0] / LEFT, xs[-1]], "nice": False}
        axis = {"values": list(xs), "grid": False, "labelOverlap": True, **self.x_axis}
        if self.places:
            axis["labelExpr"] = f"{json.dumps(self.places)}[datum.value - 1]"
        return channel("x", title=self.across, scale=scale, axis=axis)

    def y(self, name: str) -> Spec:
        kind = {"type": "log"} if self.is_log else {"zero": True}
        scale = {**kind, "domain": list(self.domain), "nice": False}
        axis = {"tickCount": 6, **self.y_axis}
        return channel(name, title=self.up, scale=scale, axis=axis)

    def _pixel(self, value: float) -> float:
        """Below the upper edge."""
        low, high = self.domain
        share = log2(value / low) / log2(high / low) if self.is_log else (value - low) / (high - low)
        return self.height * (1 - share)

    def _value(self, pixel: float) -> float:
        low, high = self.domain
        share = 1 - pixel / self.height
        return float(low * (high / low) ** share) if self.is_log else low + share * (high - low)
