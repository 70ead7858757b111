"""Points where the tables' figures put them, names next to them, and the frontier."""

from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.record import MemoryPart, RankPart
from harness.tell.pictures.bars import MOST_CELLS
from harness.tell.pictures.plots import throughput_picture, trade_off_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts, timed
from tests.records import make_ranks


def test_points_are_percent_of_ddp_and_named_directly() -> None:
    picture = trade_off_picture(compared(timed("ddp", 0.5), timed("zero3", 1.0)))
    assert {row["name"]: (row["memory"], row["rate"]) for row in rows_of(picture)} == {
        "ddp": (100, 100), "zero3": (100, 50),
    }  # fmt: skip
    assert {"ddp", "zero3"} <= set(texts(picture))
    assert "2 ranks: ddp 2.00 MB, 100 %; zero3 2.00 MB, 50 %" in made(picture).alt


def test_throughput_is_the_ratio_by_round_as_in_the_tables() -> None:
    """The ratio of medians is another where rounds differ by more than the cells: 1.0 / 1.5 here."""
    seconds = {"ddp": (1.0, 1.0, 4.0), "fsdp": (1.25, 1.5, 5.0)}
    runs = [timed(label, s, repeat=n) for label, of in seconds.items() for n, s in enumerate(of)]
    comparison = compared(*runs)
    rate = {row["name"]: row["rate"] for row in rows_of(trade_off_picture(comparison))}["fsdp"]
    assert rate == pytest.approx({row["name"]: row["value"] for row in bars(comparison)}["fsdp"])
    assert rate == pytest.approx(100 * next(iter(comparison.rankings.values())).to_base["fsdp"].middle)
    assert rate > 75


def bars(comparison: Comparison) -> list[dict[str, Any]]:
    return rows_of(throughput_picture(comparison))


def test_without_ddp_the_first_that_is_listed_is_the_base() -> None:
    picture = trade_off_picture(compared(timed("fsdp", 0.5), timed("zero3", 1.0)))
    assert {row["name"]: row["rate"] for row in rows_of(picture)} == {"fsdp": 200, "zero3": 100}
    assert "throughput, % of zero3 on the same ranks" in texts(picture)


def test_cells_that_share_no_round_are_not_drawn_together() -> None:
    assert trade_off_picture(compared(timed("ddp", 0.5), timed("zero3", 1.0, repeat=1))) is None


def test_memory_far_beyond_the_others_is_cut_and_written() -> None:
    """Else it would press all others into one column."""
    peaks = {"ddp": 4 * 10**6, "fsdp": 3 * 10**6, "zero3": 2 * 10**8}
    runs = [
        timed(label, 0.5 + n / 10, ranks=make_ranks_of(peak)) for n, (label, peak) in enumerate(peaks.items())
    ]
    picture = made(trade_off_picture(compared(*runs)))
    assert {row["name"]: row["memory"] for row in rows_of(picture)} == {
        "ddp": 100, "fsdp": 75, "zero3": pytest.approx(115),
    }  # fmt: skip
    assert {"ddp", "fsdp", "zero3 → 5,000 %"} <= set(texts(picture))
    assert "Memory is cut at 115 %" in picture.caption
    assert "zero3 200 MB" in picture.alt
    assert "is cut" not in made(trade_off_picture(compared(*runs[:2]))).caption


def test_a_frontier_is_drawn_through_cells_that_are_shown_to_be_faster() -> None:
    runs = [
        timed(label, seconds + n / 1000, repeat=n, ranks=make_ranks_of(peak))
        for label, seconds, peak in (("fsdp", 1.0, 10**6), ("ddp", 0.5, 2 * 10**6), ("zero3", 1.0, 3 * 10**6))
        for n in range(6)
    ]
    picture = made(trade_off_picture(compared(*runs)))
    on_it = {row["name"] for row in rows_of(picture) if row["on_frontier"]}
    assert on_it == {"fsdp", "ddp"}
    assert "Pareto frontier, each step shown to be faster: fsdp and ddp" in picture.caption


def make_ranks_of(peak: int) -> list[RankPart]:
    moment = MemoryPart(step=1, moment="after_backward", allocated_bytes=peak, peak_bytes=peak, kinds={})
    return [rank.model_copy(update={"memory": [moment]}) for rank in make_ranks(2)]


def test_of_single_runs_no_frontier_is_drawn() -> None:
    picture = made(trade_off_picture(compared(timed("ddp", 0.5), timed("zero3", 1.0))))
    assert "No frontier is drawn: too few rounds" in picture.caption


def test_of_many_cells_the_fastest_are_drawn_and_the_caption_says_so() -> None:
    runs = [timed(f"zero3:reduce_bucket_size={n}", 0.5 + n / 100) for n in range(1, MOST_CELLS + 6)]
    picture = made(trade_off_picture(compared(*runs)))
    assert len(rows_of(picture)) == MOST_CELLS
    assert max(row["tokens_per_second"] for row in rows_of(picture)) == 1024 / 0.51
    assert f"Drawn: {MOST_CELLS} of {MOST_CELLS + 5} cells" in picture.caption
