"""The bytes of a picture follow from what it shows."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files

import pytest

from harness.backends.registry import BUILT_IN
from harness.judge.comparison import Comparison
from harness.tell.document import Picture
from harness.tell.pictures.drawing import FAMILY_COLOURS, GREY, LIMIT, draw, look_of
from harness.tell.pictures.plots import (
    loss_picture,
    memory_picture,
    throughput_picture,
    trade_off_picture,
    volume_picture,
)
from tests.harness.tell.cells import compared, rows_of, texts, timed

LABEL = "3.14159 <b>&> 2.71828"
NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")


def a_picture(noise: float = 0.0) -> Picture:
    values = [{"x": 0.1, "y": 1e-7}, {"x": 0.2, "y": 2e-3 + noise}, {"x": 1 / 3, "y": 5.0}]
    chart = {
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": LABEL},
            "y": {"field": "y", "type": "quantitative"},
        },
    }
    return Picture(key="a", caption="", alt="what it shows", chart=lambda: chart)


def test_rounding_noise_of_a_machine_does_not_change_a_picture() -> None:
    assert draw(a_picture()) == draw(a_picture(noise=1e-9))
    assert draw(a_picture()) != draw(a_picture(noise=0.1))


def test_svg_carries_no_version_no_address_and_coordinates_of_hundredths() -> None:
    svg = draw(a_picture()).decode()
    assert not re.search(r"<[^>]*\d\.\d{3,}[^>]*>", svg)
    assert set(re.findall(r"https?://[^\"]*", svg)) == set(NAMESPACES)


def test_an_svg_has_no_background_and_a_png_a_white_one() -> None:
    from PIL import Image

    assert b"<rect" not in draw(a_picture())
    with Image.open(io.BytesIO(draw(a_picture(), "png"))) as image:
        assert image.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_a_heading_is_drawn() -> None:
    assert b">of 2 ranks<" in draw(a_picture(), heading="of 2 ranks")


def test_nothing_is_fetched() -> None:
    chart = {"data": {"url": "https://example.com/data.csv"}, "mark": "bar"}
    with pytest.raises(ValueError, match=r"Access denied|not allowed|base_urls"):
        draw(Picture(key="a", caption="", alt="", chart=lambda: chart))


LABELS = ("ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-zero3")
MAKERS = (throughput_picture, memory_picture, volume_picture, loss_picture, trade_off_picture)


@pytest.mark.parametrize("make", MAKERS)
def test_every_picture_draws_a_backend_in_the_colour_of_its_family(
    make: Callable[[Comparison], Picture | None],
) -> None:
    picture = make(compared(*(timed(label, 0.5 + n / 10) for n, label in enumerate(LABELS))))
    colours = {row["backend"]: row["colour"] for row in rows_of(picture) if row["backend"] != "single"}
    assert colours == {label: look_of(BUILT_IN[label].strategy)["colour"] for label in LABELS}


def test_accelerate_has_the_colour_of_what_it_wraps_and_is_outlined() -> None:
    wrapped, native = (look_of(BUILT_IN[label].strategy) for label in ("accelerate-zero3", "zero3"))
    assert wrapped["colour"] == native["colour"]
    assert wrapped["opacity"] < native["opacity"]
    assert wrapped["dash"] != native["dash"]


def test_families_have_distinct_colours_that_show_on_white_and_on_dark() -> None:
    colours = [colour for _, colour in FAMILY_COLOURS.values()]
    assert len(set(colours)) == len(colours)
    for colour in colours:
        for page in ("#ffffff", "#0d1117"):
            assert contrast(colour, page) > 2.2, (colour, page)


def test_text_is_readable_on_white_and_on_dark() -> None:
    """4.5:1 is WCAG's AA; no one colour reaches it on both, so a dark report brightens its pictures."""
    style = files("harness.tell.writers").joinpath("report.css").read_text()
    (brighter,) = map(float, re.findall(r"figure img { filter: brightness\(([0-9.]+)\); }", style))
    for colour in (GREY, LIMIT):
        assert contrast(colour, "#ffffff") >= 4.5, colour
        assert contrast(colour, "#0d1117") >= 4.1, colour
        parts = (min(255, round(int(colour[at : at + 2], 16) * brighter)) for at in (1, 3, 5))
        assert contrast(f"#{bytes(parts).hex()}", "#0d1117") >= 4.5, colour


def contrast(one: str, other: str) -> float:
    """Ratio of WCAG 2."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", ["zero", "nobody"])
def test_a_page_may_draw_some_of_the_rows(make: Callable[[Comparison], Picture | None], family: str) -> None:
    picture = make(compared(*(timed(label, 0.5 + n / 10) for n, label in enumerate(LABELS))))
    chart = picture.chart()
    kept = [row for row in chart["data"]["values"] if row["backend"].startswith(family)]
    chart["data"]["values"] = kept
    shown = " ".join(texts(replace(picture, chart=lambda: chart)))
    assert "fsdp" not in shown
    assert family == "nobody" or "zero" in shown or "agree" in shown
