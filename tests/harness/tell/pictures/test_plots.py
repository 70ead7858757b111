"""Loss: cells that agree are one band, each that does not has a line and a name."""

from __future__ import annotations

from typing import Any

import pytest

from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.record import MemoryPart, RankPart
from harness.tell.pictures.bars import MOST_CELLS
from harness.tell.pictures.plots import (
    MOST_IN_ONE,
    MOST_OUTLIERS,
    MOST_STEPS,
    loss_picture,
    strong_picture,
    throughput_picture,
    trade_off_picture,
    weak_picture,
    x_channel,
)
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts, timed
from tests.records import LOSSES, make_ranks, make_record, make_steps

NEAR = [loss + 1e-7 for loss in LOSSES]
FAR = [loss + 0.25 for loss in LOSSES]


def test_rows_hold_each_cell_s_losses_and_their_difference_to_the_reference() -> None:
    found = {row["backend"]: row for row in rows_of(loss_picture(compared(diverged("ddp"))))}
    assert found["ddp"]["losses"] == FAR
    assert found["ddp"]["differences"] == [0.25] * len(LOSSES)
    assert found["single"]["differences"] == []


def diverged(label: str, **changes: object):  # type: ignore[no-untyped-def]
    return make_record(label=label, steps=make_steps(FAR), **changes)


def test_cells_that_agree_are_counted_and_those_that_diverged_are_named() -> None:
    agreeing = make_record(label="fsdp", steps=make_steps(NEAR))
    picture = made(loss_picture(compared(agreeing, diverged("ddp"))))
    shown = texts(picture)
    assert "1 cell agrees" in shown
    assert shown.count("ddp on 2 diverged") == 2
    assert "Diverged, with the largest difference of their loss: ddp on 2 ranks (2.5e-01)." in picture.alt
    assert "1 cell within the limit, at most 1.0e-07 from the reference" in picture.alt


def test_without_outliers_the_limit_is_drawn_around_the_band() -> None:
    picture = made(loss_picture(compared(make_record(label="fsdp", steps=make_steps(NEAR)))))
    limits = {row["limit"] for row in rows_of(picture)} - {None}
    (limit,) = limits
    assert any(text.startswith("limit ") for text in texts(picture))
    assert f"limit {limit:.1e}" in picture.caption


def test_of_many_outliers_the_furthest_are_drawn_and_the_caption_says_so() -> None:
    labels = [f"zero3:reduce_bucket_size={n}" for n in range(1, MOST_OUTLIERS + 4)]
    picture = made(loss_picture(compared(*map(diverged, labels))))
    assert len(rows_of(picture)) == 1 + MOST_OUTLIERS
    assert f"Drawn: {1 + MOST_OUTLIERS} of {1 + len(labels)} cells" in picture.caption


def test_of_many_steps_some_are_drawn_first_and_last_among_them() -> None:
    losses = [5.0 - step / 1000 for step in range(1001)]
    steps = make_steps(losses, [1.0] * len(losses))
    (row,) = rows_of(loss_picture(compared().of_rows(compared(make_record(steps=steps)).rows[1:])))
    assert (row["steps"][0], row["steps"][-1]) == (0, 1000)
    assert len(row["steps"]) <= MOST_STEPS + 1


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [(0, 2, [0, 1, 2]), (0, 19, list(range(0, 20, 2))), (7, 95, list(range(10, 91, 10))), (3, 3, [3])],
)
def test_ticks_are_whole_steps(first: int, last: int, ticks: list[int]) -> None:
    assert x_channel(range(first, last + 1), titled=True)["axis"]["values"] == ticks


def test_of_few_steps_each_tick_stands_once() -> None:
    shown = texts(loss_picture(compared(diverged("ddp"))))
    assert [text for text in shown if text in "123"] == [*"123", *"123"]


def test_each_job_has_panels_of_its_own() -> None:
    other = {"job_id": "f" * 12}
    jobs = compared(
        diverged("ddp"), make_record(run_id="b", **other), make_record(label="ddp", world_size=4, **other)
    )
    shown = texts(loss_picture(jobs))
    assert "2 ranks, job 012345" in shown
    assert "4 ranks, job ffffff" in shown


def test_points_are_speed_ups_and_the_last_carries_the_name() -> None:
    runs = [timed("ddp", 0.5, 1), timed("ddp", 0.25, 2), timed("ddp", 0.2, 4)]
    picture = strong_picture(strong_scaling(compared(*runs)))
    points = {row["ranks"]: (row["value"], row["ideal"], row["label"]) for row in rows_of(picture)}
    assert points == {1: (1.0, 1.0, None), 2: (2.0, 2.0, None), 4: (2.5, 4.0, "ddp 2.50 x")}
    assert "ddp 2.50 x" in texts(picture)
    assert "ddp 2.50 x on 4 ranks" in made(picture).alt


def test_more_than_eight_curves_get_a_panel_for_each_family() -> None:
    labels = ["ddp", *(f"zero{n}" for n in range(4)), "fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-grad-op"]
    runs = [timed(label, 1 / size, size) for label in labels for size in (1, 2)]
    assert len(labels) > MOST_IN_ONE
    shown = texts(strong_picture(strong_scaling(compared(*runs))))
    assert [text for text in shown if text in ("DDP", "ZeRO", "FSDP2", "FSDP1")] == [
        "DDP", "ZeRO", "FSDP2", "FSDP1",
    ]  # fmt: skip
    assert all(any(text.startswith(f"{label} ") for text in shown) for label in labels)


def test_weak_scaling_shows_efficiency_in_percent() -> None:
    runs = [
        timed("ddp", 0.5, 1, job_id="a" * 12),
        timed("ddp", 0.625, 2, job_id="b" * 12, training={"global_batch_size": 16}),
    ]
    picture = weak_picture(weak_scaling(compared(*runs)))
    assert [row["value"] for row in rows_of(picture)] == [100, 80]
    assert "ddp 80 %" in texts(picture)


def test_intervals_stand_beside_their_points_and_within_the_picture() -> None:
    runs = [
        timed(label, seconds / size * (1 + 0.02 * repeat * (size - 1)), size, repeat=repeat)
        for label, size in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2))
        for repeat, seconds in enumerate((0.5, 0.6, 0.4, 0.7, 0.5, 0.6, 0.45))
    ]
    curves = strong_scaling(compared(*runs))
    picture = strong_picture(curves)
    drawn = [row for row in rows_of(picture) if row["low"] is not None]
    extents = [point.ratio.extent for curve in curves for point in curve if point.ratio.extent]
    assert [(row["low"], row["high"]) for row in drawn] == [(e.low, e.high) for e in extents]
    assert len({row["beside"] for row in drawn}) == len(drawn) == 2
    assert all(row["low"] < row["value"] < row["high"] for row in drawn)
    assert "95 % interval" in made(picture).caption


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


def test_bars_are_the_median_throughput_in_percent_of_ddp_fastest_first() -> None:
    picture = throughput_picture(compared(timed("zero3", 1.0), timed("ddp", 0.5), timed("fsdp", 0.4)))
    assert [(row["name"], row["value"]) for row in rows_of(picture)] == [
        ("fsdp", pytest.approx(125)), ("ddp", 100), ("zero3", 50),
    ]  # fmt: skip
    assert {"125 %", "100 % = 2,048 tokens/s", "50 %", "2 ranks"} <= set(texts(picture))


def test_each_number_of_ranks_has_its_own_ddp() -> None:
    runs = [timed("ddp", 0.5), timed("fsdp", 1.0), timed("ddp", 1.0, 4), timed("fsdp", 1.0, 4)]
    found = {row["cell"]: row["value"] for row in rows_of(throughput_picture(compared(*runs)))}
    assert found == {"ddp on 2": 100, "fsdp on 2": 50, "ddp on 4": 100, "fsdp on 4": 100}


def test_without_ddp_the_first_that_is_listed_is_the_base_of_the_bars() -> None:
    picture = throughput_picture(compared(timed("zero3", 1.0), timed("fsdp", 0.5)))
    assert [row["value"] for row in rows_of(picture)] == [200, 100]
    assert "throughput, % of zero3 on the same ranks" in texts(picture)


def test_lines_are_the_interval_of_the_ratio_in_the_same_round() -> None:
    """The machine drifts by far more than the ratio does."""
    many = [
        timed(label, seconds * (1 + n) * (1 + extra * n / 100), repeat=n)
        for label, seconds, extra in (("ddp", 0.5, 0), ("fsdp", 1.0, 1))
        for n in range(7)
    ]
    by_name = {row["name"]: row for row in rows_of(throughput_picture(compared(*many)))}
    assert 46 < by_name["fsdp"]["low"] < by_name["fsdp"]["value"] < by_name["fsdp"]["high"] < 51
    assert by_name["ddp"]["low"] is None
    few = rows_of(throughput_picture(compared(*(run for run in many if run.repeat < 5))))
    assert {row["low"] for row in few} == {None}


def test_one_backend_alone_is_compared_with_nothing() -> None:
    assert throughput_picture(compared(timed("ddp", 0.5))) is None


def test_alternative_text_names_the_figures() -> None:
    picture = made(throughput_picture(compared(timed("zero3", 1.0), timed("ddp", 0.5))))
    assert "2 ranks: ddp 100 % = 2,048 tokens/s, zero3 50 %" in picture.alt
    assert "Fewer than 6 rounds: no interval is known, and no order." in picture.caption
