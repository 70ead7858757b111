"""One bar for each cell: model states, what else the peak holds, what is expected, and the limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.comparison import Comparison
from harness.judge.facts import SENT, TEXTBOOK_SENT
from harness.record import MemoryPart, Record
from harness.tell.document import Picture
from harness.tell.pictures.bars import (
    LABELS,
    MOST_CELLS,
    MOST_TOLD,
    REST,
    caption,
    cell_row,
    drawable,
    memory_picture,
    told,
    volume_picture,
)
from harness.tell.pictures.drawing import LINE, along, beside, complete, draw, first_drawn, spread
from harness.tell.pictures.plots import throughput_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts, timed
from tests.records import make_communication, make_ranks, make_record

KINDS = {"weights": 10**6, "gradients": 10**6, "optimizer": 2 * 10**6, "activations": 10**5}


def held(label: str = "ddp", peak: int = 10 * 10**6, limit: int | None = None) -> Record:
    record = make_record(label=label)
    moment = MemoryPart(
        step=3, moment="after_backward", allocated_bytes=5 * 10**6, peak_bytes=peak, kinds=KINDS
    )
    ranks = [rank.model_copy(update={"memory": [moment]}) for rank in record.ranks]
    world = record.world.model_copy(update={"memory_limit_bytes": limit})
    return record.model_copy(update={"ranks": ranks, "world": world})


def test_states_are_those_after_the_backward_pass_and_the_bar_ends_at_the_peak() -> None:
    rows = [row for row in rows_of(memory_picture(compared(held()))) if row["backend"] == "ddp"]
    assert {row["kind"]: row["megabytes"] for row in rows} == {
        "weights": 1.0, "gradients": 1.0, "optimizer": 2.0, LABELS[REST]: 6.0,
    }  # fmt: skip
    assert sum(row["megabytes"] for row in rows) == pytest.approx(10.0)


def test_peak_and_states_are_written_at_the_bar_and_in_the_alternative_text() -> None:
    picture = made(memory_picture(compared(held())))
    assert "10.0 MB, states 4.00" in texts(picture)
    assert "ddp 10.0 MB, states 4.00" in picture.alt


def test_a_limit_near_the_peaks_is_a_line_and_a_far_one_only_told() -> None:
    near, far = (made(memory_picture(compared(held(limit=limit)))) for limit in (20 * 10**6, 10**9))
    assert {row["limit"] for row in rows_of(near)} == {20.0, None}
    assert {row["limit"] for row in rows_of(far)} == {None}
    assert "device limit 20.0 MB" in texts(near)
    assert "Device limit: 20.0 MB" in near.caption
    assert "Device limit: 1,000 MB" in far.caption
    assert "Device limit" not in made(memory_picture(compared(held()))).caption


def test_a_backend_that_names_no_kinds_shows_its_peak() -> None:
    record = held()
    moments = [record.ranks[0].memory[0].model_copy(update={"kinds": None})]
    unnamed = record.model_copy(
        update={"ranks": [rank.model_copy(update={"memory": moments}) for rank in record.ranks]}
    )
    (row,) = [row for row in rows_of(memory_picture(compared(unnamed))) if row["backend"] == "ddp"]
    assert (row["megabytes"], row["text"]) == (10.0, "10.0 MB")


def test_a_bar_far_beyond_the_others_is_cut_and_says_so() -> None:
    def of(label: str, peak: int) -> Record:
        ranks = [
            rank.model_copy(
                update={"memory": [part.model_copy(update={"peak_bytes": peak}) for part in rank.memory]}
            )
            for rank in make_ranks(2)
        ]
        return make_record(label=label, ranks=ranks)

    picture = memory_picture(
        Comparison([of("ddp", 40_000_000), of("fsdp", 30_000_000), of("zero3", 2_000_000_000)])
    )
    assert picture is not None
    rows = [row for row in picture.chart()["data"]["values"] if row["end"] is not None]
    ends = {row["backend"]: row["end"] for row in rows}
    assert ends == {"ddp": 40.0, "fsdp": 30.0, "zero3": pytest.approx(46.0)}
    assert {row["backend"]: row["peak"] for row in rows}["zero3"] == 2000.0
    (text,) = [row["text"] for row in rows if row["backend"] == "zero3"]
    assert text.startswith("2,000 MB")
    assert text.endswith("(bar cut)")
    assert "Bars are cut at 46.0 MB." in picture.caption


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


def test_a_row_says_what_a_page_filters_by() -> None:
    (group,) = [group for group in compared(timed("ddp", 0.5, 4)).groups if group.backend == "ddp"]
    row = cell_row(group, [group])
    assert {key: row[key] for key in ("cell", "backend", "ranks", "nodes", "precision", "place")} == {
        "cell": "ddp on 4", "backend": "ddp", "ranks": 4, "nodes": 1, "precision": "fp32", "place": "4 ranks",
    }  # fmt: skip


def test_jobs_are_named_only_where_one_number_of_ranks_has_several() -> None:
    groups = compared(timed("ddp", 0.5), timed("fsdp", 0.5, job_id="f" * 12)).groups
    places = [cell_row(group, groups)["place"] for group in groups]
    assert places == ["1 rank", "2 ranks, job 012345", "2 ranks, job ffffff"]


def test_of_many_cells_those_of_one_world_size_are_drawn_and_the_caption_says_so() -> None:
    labels = [f"zero3:reduce_bucket_size={n}" for n in range(1, MOST_CELLS)]
    groups = compared(*(timed(label, 0.5, size) for label in labels for size in (2, 4))).groups
    drawn = drawable(groups)
    assert {group.world_size for group in drawn} == {4}
    assert "Drawn: 23 of 47 cells, on 4 ranks" in caption("", drawn, groups)


def test_an_alternative_text_names_both_ends_of_a_long_list() -> None:
    rows = [{"place": "2 ranks", "name": f"cell{n}", "text": f"{n} %"} for n in range(20)]
    text = told(rows)
    assert text.startswith("2 ranks: cell0 0 %, cell1 1 %")
    assert text.endswith("..., cell18 18 %, cell19 19 %")
    assert text.count("cell") == MOST_TOLD


def test_of_many_places_each_names_its_first_and_last_cell() -> None:
    rows = [{"place": f"{p} ranks", "name": f"c{n}", "text": ""} for p in range(8) for n in range(5)]
    assert told(rows).count("c0") == told(rows).count("c4") == 8
    assert "c2" not in told(rows)


SIZES = (2, 4)
BARS = (throughput_picture, memory_picture, volume_picture)


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


@pytest.mark.parametrize("make", BARS)
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
    assert f">{other} ranks<" not in draw(picture).decode()


@given(st.lists(st.floats(0, 300), max_size=20))
def test_names_at_line_ends_keep_their_order_and_distance(places: list[float]) -> None:
    found = spread(places, 0, 300)
    in_order = [found[index] for index in sorted(range(len(places)), key=lambda i: places[i])]
    assert all(above + LINE <= below + 1e-6 for above, below in pairwise(in_order))
    assert len(places) < 2 or max(found) <= max(300, LINE * (len(places) - 1)) + 1e-6


def test_a_name_with_room_stays_where_its_line_ends() -> None:
    assert spread([10.0, 100.0, 200.0], 0, 300) == [10.0, 100.0, 200.0]


def test_two_names_at_one_place_share_the_way() -> None:
    assert spread([100.0, 100.0], 0, 300) == [100 - LINE / 2, 100 + LINE / 2]


def test_names_of_near_points_cover_neither_each_other_nor_a_point() -> None:
    points = [(100.0, 100.0), (104.0, 101.0), (108.0, 99.0), (300.0, 40.0)]
    boxes = beside(points, ["first", "second", "third", "alone"], 600, 360)
    for index, box in enumerate(boxes):
        assert not any(box.covers(other) for other in boxes[:index])
        assert not any(box.holds(point) for point in points)


def test_names_stay_within_the_panel() -> None:
    (box,) = beside([(590.0, 5.0)], ["a long name at the edge"], 600, 360)
    assert box.left + box.width <= 600


def test_a_name_leaves_a_line_free() -> None:
    line = along([(0.0, 100.0), (600.0, 100.0)])
    (box,) = beside([(300.0, 100.0)], ["zero3"], 600, 360, line)
    assert not any(box.holds(point) for point in line)
