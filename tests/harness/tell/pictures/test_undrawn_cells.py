"""Pictures of many cells draw those of one number of ranks and hold the data of all."""

import pytest

from harness.judge.comparison import Comparison
from harness.tell.document import Picture
from harness.tell.pictures.bars import MOST_CELLS, memory_picture, volume_picture
from harness.tell.pictures.drawing import complete, draw, first_drawn
from harness.tell.pictures.plots import throughput_picture
from tests.records import make_record

SIZES = (2, 4)
MAKERS = (throughput_picture, memory_picture, volume_picture)


@pytest.fixture(scope="module")
def many() -> Comparison:
    labels = ["ddp", *(f"zero1:bucket={number}" for number in range(MOST_CELLS - 1))]
    return Comparison(
        [
            make_record(label=label, world_size=size, run_id=f"{label}-{size}")
            for label in labels
            for size in SIZES
        ]
    )


@pytest.mark.parametrize("make", MAKERS)
def test_undrawn_cells_are_in_the_data_alone(many: Comparison, make) -> None:  # type: ignore[no-untyped-def]
    picture = make(many)
    assert isinstance(picture, Picture)
    every = complete(picture)["data"]["values"]
    drawn = first_drawn(picture)["data"]["values"]
    assert {row["ranks"] for row in every} == set(SIZES)
    assert len({row["ranks"] for row in drawn}) == 1
    (size,) = {row["ranks"] for row in drawn}
    assert [row for row in every if row["ranks"] == size] == drawn
    other = next(size for size in SIZES if size != drawn[0]["ranks"])
    assert f">{other} ranks<" not in draw(picture, ("svg",))["svg"].decode()
