"""The bytes of a picture follow from what it shows."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from harness.report.document import Picture
from harness.report.drawing import draw

PAINT = """
import hashlib
from tests.harness.report.test_drawing import a_picture
from harness.report.drawing import draw
print({form: hashlib.sha256(data).hexdigest() for form, data in draw(a_picture()).items()})
"""
LABEL = "3.14159 <b>&>\n  second 2.71828 line"


def a_picture(noise: float = 0.0) -> Picture:
    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([0.1, 0.2, 1 / 3], [1e-7, -2e-3 + noise, 5.0], marker="o", label="a curve")
        axes.bar([0.1, 0.2], [1.0, 2.0], width=0.01, hatch="////")
        axes.set_xlabel(LABEL)
        axes.legend()

    return Picture(key="a", width_inches=4, height_inches=3, draw=paint, caption="")


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


def test_svg_carries_no_time_no_version_and_coordinates_of_hundredths() -> None:
    svg = draw(a_picture(), ("svg",))["svg"].decode()
    assert not re.search(r"<[^>]*\d\.\d{3,}[^>]*>", svg)
    assert "matplotlib.org" not in svg
    assert "<dc:date>" not in svg


def test_text_of_an_svg_stays_as_it_is() -> None:
    svg = ElementTree.fromstring(draw(a_picture(), ("svg",))["svg"])
    texts = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert all(line in "\n".join(texts) for line in LABEL.split("\n"))


def test_a_picture_is_the_same_whatever_else_is_drawn() -> None:
    both = draw(a_picture(), ("svg", "png"))
    assert {form: draw(a_picture(), (form,))[form] for form in both} == both
