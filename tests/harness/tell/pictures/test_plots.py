"""One bar for each cell: model states, what else the peak holds, what is expected, and the limit."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.judge.facts import SENT, TEXTBOOK_SENT
from harness.record import MemoryPart, RankPart, Record
from harness.tell.document import Picture
from harness.tell.pictures import plots
from harness.tell.pictures.drawing import LINE, along, beside, draw, spread
from tests.harness.tell.cells import compared, made, of_size, rows_of, texts, timed, with_world
from tests.records import LOSSES, make_communication, make_ranks, make_record, make_steps

KINDS = {"weights": 10**6, "gradients": 10**6, "optimizer": 2 * 10**6, "activations": 10**5}


def held(limit: int | None = None, kinds: dict[str, int] | None = KINDS) -> Record:
    moment = MemoryPart(
        step=3, moment="after_backward", allocated_bytes=5 * 10**6, peak_bytes=10**7, kinds=kinds
    )
    ranks = [rank.model_copy(update={"memory": [moment]}) for rank in make_ranks(2)]
    return with_world(make_record(label="ddp", ranks=ranks), memory_limit_bytes=limit)


def test_states_are_those_after_the_backward_pass_and_the_bar_ends_at_the_peak() -> None:
    picture = made(plots.memory_picture(compared(held())))
    rows = [row for row in rows_of(picture) if row["backend"] == "ddp"]
    assert {row["kind"]: row["megabytes"] for row in rows} == {
        "weights": 1.0, "gradients": 1.0, "optimizer": 2.0, plots.LABELS[plots.REST]: 6.0,
    }  # fmt: skip
    assert sum(row["megabytes"] for row in rows) == pytest.approx(10.0)
    assert "10.0 MB, states 4.00" in texts(picture)
    assert "ddp 10.0 MB, states 4.00" in picture.alt


def test_a_limit_near_the_peaks_is_a_line_and_a_far_one_only_told() -> None:
    near, far = (made(plots.memory_picture(compared(held(limit=limit)))) for limit in (20 * 10**6, 10**9))
    assert {row["limit"] for row in rows_of(near)} == {20.0, None}
    assert {row["limit"] for row in rows_of(far)} == {None}
    assert "device limit 20.0 MB" in texts(near)
    assert "Device limit: 20.0 MB" in near.caption
    assert "Device limit: 1,000 MB" in far.caption
    assert "Device limit" not in made(plots.memory_picture(compared(held()))).caption
    unnamed = rows_of(plots.memory_picture(compared(held(kinds=None))))
    (row,) = [row for row in unnamed if row["backend"] == "ddp"]
    assert (row["megabytes"], row["text"]) == (10.0, "10.0 MB"), "a backend that names no kinds"


def test_a_bar_far_beyond_the_others_is_cut_and_says_so() -> None:
    peaks = {"ddp": 40_000_000, "fsdp": 30_000_000, "zero3": 2_000_000_000}
    picture = made(plots.memory_picture(Comparison(of_size(label, peak) for label, peak in peaks.items())))
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


def test_bars_and_strokes_are_the_figures_of_the_cell_and_a_ratio_is_written_where_it_is_not_one() -> None:
    found = comparison()
    (group,) = [group for group in found.groups if group.backend == "ddp"]
    (row,) = rows_of(plots.volume_picture(found))
    figures = [group.median(key) for key in (SENT, TEXTBOOK_SENT)]
    assert [row["megabytes"], row["textbook"]] == [value / 1e6 for value in figures if value is not None]
    assert "0.004 MB" in texts(plots.volume_picture(found))
    more = made(plots.volume_picture(comparison(6000)))
    assert "0.006 MB = 1.5 x textbook" in texts(more)
    assert "ddp 0.006 MB = 1.5 x textbook" in more.alt


def test_an_alternative_text_names_both_ends_of_a_long_list() -> None:
    rows = [{"place": "2 ranks", "name": f"cell{n}", "text": f"{n} %"} for n in range(20)]
    text = plots.told(rows)
    assert text.startswith("2 ranks: cell0 0 %, cell1 1 %")
    assert text.endswith("..., cell19 19 %")
    assert text.count("cell") == plots.MOST_TOLD


SIZES = (2, 4)
BARS = (plots.throughput_picture, plots.memory_picture, plots.volume_picture)


@pytest.fixture(scope="module")
def many() -> Comparison:
    labels = ["ddp", *(f"zero1:bucket={number}" for number in range(plots.MOST_CELLS - 1))]
    return Comparison(
        [
            make_record(label=label, world_size=size, run_id=f"{label}-{size}")
            for label in labels
            for size in SIZES
        ]
    )


@pytest.mark.parametrize("make", BARS)
def test_of_too_many_cells_those_of_one_size_are_drawn(many: Comparison, make) -> None:  # type: ignore[no-untyped-def]
    picture = make(many)
    assert isinstance(picture, Picture)
    (size,) = {row["ranks"] for row in rows_of(picture)}
    (other,) = {*SIZES} - {size}
    assert f">{other} ranks<" not in draw(picture).decode()
    assert f" cells, on {size} ranks" in picture.caption


@given(st.lists(st.floats(0, 300), max_size=20))
def test_names_at_line_ends_keep_their_order_and_distance(places: list[float]) -> None:
    found = spread(places, 0, 300)
    in_order = [found[index] for index in sorted(range(len(places)), key=lambda i: places[i])]
    assert all(above + LINE <= below + 1e-6 for above, below in pairwise(in_order))
    assert len(places) < 2 or max(found) <= max(300, LINE * (len(places) - 1)) + 1e-6


def test_names_of_near_points_cover_neither_each_other_nor_a_point_nor_a_line_nor_leave_the_panel() -> None:
    points = [(100.0, 100.0), (104.0, 101.0), (108.0, 99.0), (300.0, 40.0)]
    boxes = beside(points, ["first", "second", "third", "alone"], 600, 360)
    for index, box in enumerate(boxes):
        assert not any(box.covers(other) for other in boxes[:index])
        assert not any(box.holds(point) for point in points)
    (box,) = beside([(590.0, 5.0)], ["a long name at the edge"], 600, 360)
    assert box.left + box.width <= 600
    line = along([(0.0, 100.0), (600.0, 100.0)])
    (box,) = beside([(300.0, 100.0)], ["zero3"], 600, 360, line)
    assert not any(box.holds(point) for point in line)


NEAR = [loss + 1e-7 for loss in LOSSES]
FAR = [loss + 0.25 for loss in LOSSES]


def diverged(label: str, **changes: object):  # type: ignore[no-untyped-def]
    return make_record(label=label, steps=make_steps(FAR), **changes)


def test_cells_that_agree_are_counted_and_those_that_diverged_are_named() -> None:
    agreeing = make_record(label="fsdp", steps=make_steps(NEAR))
    picture = made(plots.loss_picture(compared(agreeing, diverged("ddp"))))
    shown = texts(picture)
    assert [text for text in shown if text in "123"] == [*"123", *"123"], "each tick stands once"
    assert "1 cell agrees" in shown
    assert shown.count("ddp on 2 diverged") == 2
    assert "'nats per token, log beyond limit'" in str(picture.chart())
    assert "Diverged, with the largest difference of their loss: ddp on 2 ranks (2.5e-01)." in picture.alt
    assert "1 cell within the limit, at most 1.0e-07 from the reference" in picture.alt
    found = {row["backend"]: (row["losses"], row["differences"]) for row in rows_of(picture)}
    assert found["ddp"] == (FAR, [0.25] * len(LOSSES))
    assert found["single"][1] == []


def test_of_many_outliers_the_furthest_are_drawn_and_the_caption_says_so() -> None:
    labels = [f"zero3:reduce_bucket_size={n}" for n in range(1, plots.MOST_OUTLIERS + 4)]
    picture = made(plots.loss_picture(compared(*map(diverged, labels))))
    assert len(rows_of(picture)) == 1 + plots.MOST_OUTLIERS
    assert f"Drawn: {1 + plots.MOST_OUTLIERS} of {1 + len(labels)} cells" in picture.caption


def test_of_many_steps_some_are_drawn_first_and_last_among_them() -> None:
    losses = [5.0 - step / 1000 for step in range(1001)]
    steps = make_steps(losses, [1.0] * len(losses))
    (row,) = rows_of(plots.loss_picture(compared().of_rows(compared(make_record(steps=steps)).rows[1:])))
    assert (row["steps"][0], row["steps"][-1]) == (0, 1000)
    assert len(row["steps"]) <= plots.MOST_STEPS + 1


def test_each_job_has_panels_of_its_own() -> None:
    other = {"job_id": "f" * 12}
    jobs = compared(
        diverged("ddp"), make_record(run_id="b", **other), make_record(label="ddp", world_size=4, **other)
    )
    shown = texts(plots.loss_picture(jobs))
    assert "2 ranks, job 012345" in shown
    assert "4 ranks, job ffffff" in shown


def test_points_are_speed_ups_and_the_last_carries_the_name() -> None:
    runs = [timed("ddp", 0.5, 1), timed("ddp", 0.25, 2), timed("ddp", 0.2, 4)]
    picture = plots.strong_picture(strong_scaling(compared(*runs)))
    points = {row["ranks"]: (row["value"], row["ideal"], row["label"]) for row in rows_of(picture)}
    assert points == {1: (1.0, 1.0, None), 2: (2.0, 2.0, None), 4: (2.5, 4.0, "ddp 2.50 x")}
    assert "ddp 2.50 x" in texts(picture)
    assert "ddp 2.50 x on 4 ranks" in made(picture).alt


def test_more_than_eight_curves_get_a_panel_for_each_family() -> None:
    labels = ["ddp", *(f"zero{n}" for n in range(4)), "fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-grad-op"]
    runs = [timed(label, 1 / size, size) for label in labels for size in (1, 2)]
    assert len(labels) > plots.MOST_IN_ONE
    shown = texts(plots.strong_picture(strong_scaling(compared(*runs))))
    assert [text for text in shown if text in ("DDP", "ZeRO", "FSDP2", "FSDP1")] == [
        "DDP", "ZeRO", "FSDP2", "FSDP1",
    ]  # fmt: skip
    assert all(any(text.startswith(f"{label} ") for text in shown) for label in labels)


def test_weak_scaling_shows_efficiency_in_percent() -> None:
    runs = [
        timed("ddp", 0.5, 1, job_id="a" * 12),
        timed("ddp", 0.625, 2, job_id="b" * 12, training={"global_batch_size": 16}),
    ]
    picture = plots.weak_picture(weak_scaling(compared(*runs)))
    assert [row["value"] for row in rows_of(picture)] == [100, 80]
    assert "ddp 80 %" in texts(picture)


def test_intervals_stand_beside_their_points_and_within_the_picture() -> None:
    runs = [
        timed(label, seconds / size * (1 + 0.02 * repeat * (size - 1)), size, repeat=repeat)
        for label, size in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2))
        for repeat, seconds in enumerate((0.5, 0.6, 0.4, 0.7, 0.5, 0.6, 0.45))
    ]
    curves = strong_scaling(compared(*runs))
    picture = plots.strong_picture(curves)
    drawn = [row for row in rows_of(picture) if row["low"] is not None]
    extents = [point.ratio.extent for curve in curves for point in curve if point.ratio.extent]
    assert [(row["low"], row["high"]) for row in drawn] == [(e.low, e.high) for e in extents]
    assert len({row["beside"] for row in drawn}) == len(drawn) == 2
    assert all(row["low"] < row["value"] < row["high"] for row in drawn)
    assert "95 % interval" in made(picture).caption


def test_points_are_percent_of_ddp_and_named_directly_if_cells_share_a_round() -> None:
    picture = plots.trade_off_picture(compared(timed("ddp", 0.5), timed("zero3", 1.0)))
    assert {row["name"]: (row["memory"], row["rate"]) for row in rows_of(picture)} == {
        "ddp": (100, 100), "zero3": (100, 50),
    }  # fmt: skip
    assert {"ddp", "zero3"} <= set(texts(picture))
    assert "2 ranks: ddp 2.00 MB, 100 %; zero3 2.00 MB, 50 %" in made(picture).alt
    assert "No frontier is drawn (not ranked: " in made(picture).caption
    assert plots.trade_off_picture(compared(timed("ddp", 0.5), timed("zero3", 1.0, repeat=1))) is None


def test_throughput_is_the_ratio_by_round_as_in_the_tables() -> None:
    """The ratio of medians is another where rounds differ by more than the cells: 1.0 / 1.5 here."""
    seconds = {"ddp": (1.0, 1.0, 4.0), "fsdp": (1.25, 1.5, 5.0)}
    runs = [timed(label, s, repeat=n) for label, of in seconds.items() for n, s in enumerate(of)]
    comparison = compared(*runs)
    rate = {row["name"]: row["rate"] for row in rows_of(plots.trade_off_picture(comparison))}["fsdp"]
    assert rate == pytest.approx(
        {row["name"]: row["value"] for row in rows_of(plots.throughput_picture(comparison))}["fsdp"]
    )
    assert rate == pytest.approx(100 * next(iter(comparison.rankings.values())).to_base["fsdp"].middle)
    assert rate > 75


def test_memory_far_beyond_the_others_is_cut_and_written() -> None:
    """Else it would press all others into one column."""
    peaks = {"ddp": 4 * 10**6, "fsdp": 3 * 10**6, "zero3": 2 * 10**8}
    runs = [
        timed(label, 0.5 + n / 10, ranks=make_ranks_of(peak)) for n, (label, peak) in enumerate(peaks.items())
    ]
    picture = made(plots.trade_off_picture(compared(*runs)))
    assert {row["name"]: row["memory"] for row in rows_of(picture)} == {
        "ddp": 100, "fsdp": 75, "zero3": pytest.approx(115),
    }  # fmt: skip
    assert {"ddp", "fsdp", "zero3 → 5,000 %"} <= set(texts(picture))
    assert "Memory is cut at 115 %" in picture.caption
    assert "zero3 200 MB" in picture.alt
    assert "is cut" not in made(plots.trade_off_picture(compared(*runs[:2]))).caption


def test_a_frontier_is_drawn_through_cells_that_are_shown_to_be_faster() -> None:
    runs = [
        timed(label, seconds + n / 1000, repeat=n, ranks=make_ranks_of(peak))
        for label, seconds, peak in (("fsdp", 1.0, 10**6), ("ddp", 0.5, 2 * 10**6), ("zero3", 1.0, 3 * 10**6))
        for n in range(6)
    ]
    picture = made(plots.trade_off_picture(compared(*runs)))
    on_it = {row["name"] for row in rows_of(picture) if row["on_frontier"]}
    assert on_it == {"fsdp", "ddp"}
    assert "Pareto frontier, each step shown to be faster: fsdp and ddp" in picture.caption


def make_ranks_of(peak: int) -> list[RankPart]:
    moment = MemoryPart(step=1, moment="after_backward", allocated_bytes=peak, peak_bytes=peak, kinds={})
    return [rank.model_copy(update={"memory": [moment]}) for rank in make_ranks(2)]


def test_of_many_cells_the_fastest_are_drawn_and_the_caption_says_so() -> None:
    runs = [timed(f"zero3:reduce_bucket_size={n}", 0.5 + n / 100) for n in range(1, plots.MOST_CELLS + 6)]
    picture = made(plots.trade_off_picture(compared(*runs)))
    assert len(rows_of(picture)) == plots.MOST_CELLS
    assert max(row["tokens_per_second"] for row in rows_of(picture)) == 1024 / 0.51
    assert f"Drawn: {plots.MOST_CELLS} of {plots.MOST_CELLS + 5} cells" in picture.caption


def test_bars_are_the_median_throughput_in_percent_of_ddp_fastest_first() -> None:
    picture = plots.throughput_picture(compared(timed("zero3", 1.0), timed("ddp", 0.5), timed("fsdp", 0.4)))
    assert [(row["name"], row["value"]) for row in rows_of(picture)] == [
        ("fsdp", pytest.approx(125)), ("ddp", 100), ("zero3", 50),
    ]  # fmt: skip
    assert {"125 %", "100 % = 2,048 tokens/s", "50 %", "2 ranks"} <= set(texts(picture))
    assert "2 ranks: fsdp 125 %, ddp 100 % = 2,048 tokens/s, zero3 50 %" in made(picture).alt
    assert "Fewer than 6 rounds: no interval is known, and no order." in made(picture).caption
    assert plots.throughput_picture(compared(timed("ddp", 0.5))) is None, "compared with nothing"
    runs = [timed("ddp", 0.5), timed("fsdp", 1.0), timed("ddp", 1.0, 4), timed("fsdp", 1.0, 4)]
    found = {row["cell"]: row["value"] for row in rows_of(plots.throughput_picture(compared(*runs)))}
    assert found == {"ddp on 2": 100, "fsdp on 2": 50, "ddp on 4": 100, "fsdp on 4": 100}


def test_lines_are_the_interval_of_the_ratio_in_the_same_round() -> None:
    """The machine drifts by far more than the ratio does."""
    many = [
        timed(label, seconds * (1 + n) * (1 + extra * n / 100), repeat=n)
        for label, seconds, extra in (("ddp", 0.5, 0), ("fsdp", 1.0, 1))
        for n in range(7)
    ]
    by_name = {row["name"]: row for row in rows_of(plots.throughput_picture(compared(*many)))}
    assert 46 < by_name["fsdp"]["low"] < by_name["fsdp"]["value"] < by_name["fsdp"]["high"] < 51
    assert by_name["ddp"]["low"] is None
    few = rows_of(plots.throughput_picture(compared(*(run for run in many if run.repeat < 5))))
    assert {row["low"] for row in few} == {None}


def test_jobs_are_named_only_where_one_number_of_ranks_has_several() -> None:
    groups = compared(timed("ddp", 0.5), timed("fsdp", 0.5, job_id="f" * 12)).groups
    places = [plots.cell_row(group, groups)["place"] for group in groups]
    assert places == ["1 rank", "2 ranks, job 012345", "2 ranks, job ffffff"]


def test_of_many_cells_those_of_one_world_size_are_drawn_and_the_caption_says_so() -> None:
    labels = [f"zero3:reduce_bucket_size={n}" for n in range(1, plots.MOST_CELLS)]
    groups = compared(*(timed(label, 0.5, size) for label in labels for size in (2, 4))).groups
    drawn = plots.drawable(groups)
    assert {group.world_size for group in drawn} == {4}
    assert "Drawn: 23 of 47 cells, on 4 ranks" in plots.caption("", drawn, groups)


def test_without_outliers_the_limit_is_drawn_around_the_band() -> None:
    picture = made(plots.loss_picture(compared(make_record(label="fsdp", steps=make_steps(NEAR)))))
    limits = {row["limit"] for row in rows_of(picture)} - {None}
    (limit,) = limits
    assert any(text.startswith("limit ") for text in texts(picture))
    assert f"limit {limit:.1e}" in picture.caption


@pytest.mark.parametrize(
    ("make", "field"), [(plots.trade_off_picture, "rate"), (plots.throughput_picture, "value")]
)
def test_without_ddp_the_first_that_is_listed_is_the_base(make, field: str) -> None:  # type: ignore[no-untyped-def]
    picture = make(compared(timed("fsdp", 0.5), timed("zero3", 1.0)))
    assert {row["name"]: row[field] for row in rows_of(picture)} == {"fsdp": 200, "zero3": 100}
    assert "throughput, % of zero3 on the same ranks" in texts(picture)
