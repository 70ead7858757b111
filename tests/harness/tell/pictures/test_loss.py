"""Loss: cells that agree are one band, each that does not has a line and a name."""

import pytest

from harness.tell.pictures.plots import MOST_OUTLIERS, MOST_STEPS, loss_picture, x_channel
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts
from tests.records import LOSSES, make_record, make_steps

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
