"""Communication: what was sent against the textbook and what is expected."""

from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, TEXTBOOK_SENT
from harness.tell.pictures.bars import volume_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts
from tests.records import make_communication, make_record


def comparison(payload: int = 4000) -> Comparison:
    comm = make_communication(2, payload_bytes=payload)
    return compared(make_record(label="ddp", comm=comm))


def test_bars_and_strokes_are_the_figures_of_the_cell() -> None:
    found = comparison()
    (group,) = [group for group in found.groups if group.backend == "ddp"]
    (row,) = rows_of(volume_picture(found))
    figures = [group.median(key) for key in (SENT, TEXTBOOK_SENT)]
    assert [row["megabytes"], row["textbook"]] == [value / 1e6 for value in figures if value is not None]


def test_the_ratio_is_written_only_where_it_is_not_one() -> None:
    assert "0.004 MB" in texts(volume_picture(comparison()))
    assert "0.006 MB = 1.5 x textbook" in texts(volume_picture(comparison(6000)))
    assert "ddp 0.006 MB = 1.5 x textbook" in made(volume_picture(comparison(6000))).alt
