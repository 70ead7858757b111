"""Scaling: points are speed-ups and efficiencies, each curve is named at its end."""

from harness.judge.comparison import strong_scaling, weak_scaling
from harness.tell.pictures.plots import MOST_IN_ONE, strong_picture, weak_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts, timed


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
