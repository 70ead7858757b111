from harness.record import MemoryPart, RankPart
from harness.tell.pictures.bars import MOST_CELLS
from harness.tell.pictures.trade_off import trade_off_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts, timed
from tests.records import make_ranks


def test_points_are_percent_of_ddp_and_named_directly() -> None:
    picture = trade_off_picture(compared(timed("ddp", 0.5), timed("zero3", 1.0)))
    assert {row["name"]: (row["memory"], row["rate"]) for row in rows_of(picture)} == {
        "ddp": (100, 100), "zero3": (100, 50),
    }  # fmt: skip
    assert {"ddp", "zero3"} <= set(texts(picture))
    assert "ddp 2.00 MB, 2,048 tokens/s; zero3 2.00 MB, 1,024 tokens/s" in made(picture).alt


def test_without_ddp_axes_are_absolute_and_begin_at_zero() -> None:
    picture = made(trade_off_picture(compared(timed("fsdp", 0.5), timed("zero3", 1.0))))
    channel = picture.chart()["layer"][0]["encoding"]["x"]
    assert channel["scale"]["domain"][0] == 0
    assert channel["title"] == "peak memory of a rank, MB"


def test_a_cell_far_from_the_others_makes_the_axis_logarithmic() -> None:
    """Else it would press all others into one column."""
    peaks = {"ddp": 4 * 10**6, "fsdp": 3 * 10**6, "zero3": 2 * 10**8}
    runs = [
        timed(label, 0.5 + n / 10, ranks=make_ranks_of(peak)) for n, (label, peak) in enumerate(peaks.items())
    ]
    picture = made(trade_off_picture(compared(*runs)))
    channel = picture.chart()["layer"][0]["encoding"]["x"]
    assert channel["scale"]["type"] == "log"
    assert channel["title"].endswith("(logarithmic)")
    assert {"ddp", "fsdp", "zero3"} <= set(texts(picture))
    near = made(trade_off_picture(compared(*runs[:2]))).chart()["layer"][0]["encoding"]["x"]
    assert near["scale"]["type"] == "linear"


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
