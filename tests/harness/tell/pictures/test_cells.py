"""What rows say of their cell, and what alternative texts name."""

from harness.tell.pictures.bars import MOST_CELLS, MOST_TOLD, caption, cell_row, drawable, told
from tests.harness.tell.pictures.drawn import compared, timed


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
