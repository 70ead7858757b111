"""What pictures hold and show."""

import xml.etree.ElementTree as ElementTree
from typing import Any

from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Picture
from harness.tell.pictures.drawing import draw
from tests.records import make_record, make_steps

FILTERED_BY = {"cell", "backend", "ranks", "nodes", "precision"}


def timed(label: str, seconds: float, world_size: int = 2, repeat: int = 0, **changes: Any) -> Record:
    """A run whose every step took so long: 1024 tokens each."""
    return make_record(
        label=label, world_size=world_size, repeat=repeat, run_id=f"{label}-{world_size}-{repeat}",
        steps=make_steps(seconds=seconds), **changes,
    )  # fmt: skip


def made(picture: Picture | None) -> Picture:
    """The picture, which must be there."""
    assert picture is not None
    return picture


def rows_of(picture: Picture | None) -> list[dict[str, Any]]:
    """All rows of a picture's data, each of which a page can filter."""
    rows: list[dict[str, Any]] = made(picture).chart()["data"]["values"]
    for row in rows:
        assert set(row) >= FILTERED_BY, row
    return rows


def texts(picture: Picture | None) -> list[str]:
    """Every text that the SVG shows."""
    svg = ElementTree.fromstring(draw(made(picture)))
    return ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]


def compared(*records: Record) -> Comparison:
    """The reference and these runs."""
    return Comparison([make_record(), *records])
