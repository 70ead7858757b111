"""The bytes of a picture follow from what it shows."""

import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from harness.tell.document import Picture
from harness.tell.pictures.drawing import draw

PAINT = """
import hashlib
from tests.harness.tell.test_drawing import a_picture
from harness.tell.pictures.drawing import draw
print({form: hashlib.sha256(data).hexdigest() for form, data in draw(a_picture()).items()})
"""
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


def test_a_picture_that_is_asked_for_again_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = draw(a_picture(), ("svg",))
    monkeypatch.setattr("vl_convert.vegalite_to_svg", None)
    assert draw(a_picture(), ("svg",)) == first


@pytest.mark.costly
def test_every_process_draws_the_same_bytes() -> None:
    drawn = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PAINT]
        drawn.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(drawn) == 1


def test_rounding_noise_of_a_machine_does_not_change_a_picture() -> None:
    assert draw(a_picture(), ("svg",)) == draw(a_picture(noise=1e-9), ("svg",))
    assert draw(a_picture(), ("svg",)) != draw(a_picture(noise=0.1), ("svg",))


def test_svg_carries_no_version_no_address_and_coordinates_of_hundredths() -> None:
    svg = draw(a_picture(), ("svg",))["svg"].decode()
    assert not re.search(r"<[^>]*\d\.\d{3,}[^>]*>", svg)
    assert set(re.findall(r"https?://[^\"]*", svg)) == set(NAMESPACES)


def test_text_of_an_svg_stays_as_it_is() -> None:
    svg = ElementTree.fromstring(draw(a_picture(), ("svg",))["svg"])
    texts = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert LABEL in texts


def test_an_svg_has_no_background_and_a_png_a_white_one() -> None:
    from PIL import Image

    drawn = draw(a_picture())
    assert b"<rect" not in drawn["svg"]
    with Image.open(io.BytesIO(drawn["png"])) as image:
        assert image.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_nothing_is_fetched() -> None:
    chart = {"data": {"url": "https://example.com/data.csv"}, "mark": "bar"}
    with pytest.raises(ValueError, match=r"Access denied|not allowed|base_urls"):
        draw(Picture(key="a", caption="", alt="", chart=lambda: chart))


def test_a_picture_is_the_same_whatever_else_is_drawn() -> None:
    both = draw(a_picture(), ("svg", "png"))
    assert {form: draw(a_picture(), (form,))[form] for form in both} == both
