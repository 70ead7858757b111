"""One bar for each cell: model states, what else the peak holds, what is expected, and the limit."""

import pytest

from harness.judge.comparison import Comparison
from harness.record import MemoryPart, Record
from harness.tell.pictures.bars import LABELS, REST, memory_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts
from tests.records import make_ranks, make_record

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
