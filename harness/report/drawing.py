"""Pictures to SVG and PNG: a Vega-Lite specification in, one style for all, equal data give equal bytes.

Needs no network and no browser: vl-convert carries Vega, Vega-Lite and the fonts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from harness.report.document import Picture
from harness.report.palette import GREY

Spec = dict[str, Any]
Row = dict[str, Any]
RENDERER = "vl-convert-python"
VEGA_LITE = "5.21"
"""Version of Vega-Lite that draws, here and in a page that draws again."""
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
# Liberation Sans comes with the renderer and has the widths of Arial, which browsers have.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SIZE = 12
CONFIG: Spec = {
    "aria": False,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": GREY, "titleColor": GREY, "tickColor": GREY, "gridColor": GREY, "domainColor": GREY,
        "gridOpacity": 0.25, "domain": False, "labelFontSize": SIZE, "titleFontSize": SIZE,
        "titleFontWeight": "normal", "labelLimit": 280, "titlePadding": 8, "labelFlush": False,
    },
    "axisY": {"ticks": False},
    "text": {"color": GREY, "fontSize": SIZE},
    "rule": {"color": GREY},
    "title": {"color": GREY, "fontSize": SIZE, "anchor": "start", "offset": 6},
    "header": {
        "labelColor": GREY, "titleColor": GREY, "labelFontSize": SIZE + 1, "labelFontWeight": "bold",
        "labelLimit": 400,
    },
    "legend": {
        "labelColor": GREY, "titleColor": GREY, "labelFontSize": SIZE, "titleFontSize": SIZE,
        "titleFontWeight": "normal", "labelLimit": 280, "symbolStrokeWidth": 0,
    },
}  # fmt: skip
"""The style; a page that draws for a dark background overrides its greys."""
PNG_SCALE = 2.0
_TAG = re.compile(r"<[^>]*>")
_FRACTION = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def renderer() -> str:
    """Name and version of what draws; another draws other bytes."""
    return f"{RENDERER} {version(RENDERER)}"


def complete(picture: Picture) -> Spec:
    """The specification of a picture with all that it needs to be drawn anywhere, and with all its cells."""
    return {
        "$schema": SCHEMA,
        "description": picture.alt,
        "background": None,
        "padding": 8,
        **picture.chart(),
        "config": CONFIG,
    }


def only_drawn(rows: Sequence[Row]) -> list[Row]:
    """The rows without those of cells that only a filter of a page may show."""
    return [row for row in rows if row.get("is_drawn", True)]


def first_drawn(picture: Picture) -> Spec:
    """The same without the rows of cells that are not drawn at first."""
    spec = complete(picture)
    data = spec.get("data", {})
    if "values" not in data:
        return spec
    return {**spec, "data": {**data, "values": only_drawn(data["values"])}}


def draw(picture: Picture, formats: tuple[str, ...] = ("svg", "png")) -> dict[str, bytes]:
    """Draw a picture; returns its bytes by format."""
    import vl_convert  # type: ignore[import-untyped, unused-ignore]

    drawn = vl_convert.vegalite_to_svg(first_drawn(picture), vl_version=VEGA_LITE, allowed_base_urls=[])
    svg = _rounded(drawn)
    images = {
        "svg": lambda: f"{svg}\n".encode(),
        "png": lambda: vl_convert.svg_to_png(on_page(svg, "white"), scale=PNG_SCALE),
    }
    return {form: images[form]() for form in formats}


def on_page(svg: str, colour: str) -> str:
    """The picture on a page: vl-convert 1.9 writes half-transparent pixels of a PNG too dark."""
    return svg.replace(">", f'><rect width="100%" height="100%" fill="{colour}"/>', 1)


def _rounded(svg: str) -> str:
    """The same picture with coordinates of 0.01 pixel, so without rounding noise and in fewer bytes."""
    return _TAG.sub(lambda tag: _FRACTION.sub(_hundredths, tag[0]), svg)


def _hundredths(number: re.Match[str]) -> str:
    rounded = f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if rounded == "-0" else rounded
