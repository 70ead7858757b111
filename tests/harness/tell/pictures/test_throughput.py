"""Bars relative to DDP: their values, intervals and names."""

import pytest

from harness.tell.pictures.throughput import throughput_picture
from tests.harness.tell.pictures.drawn import compared, made, rows_of, texts, timed


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


def test_without_ddp_tokens_per_second_are_drawn() -> None:
    picture = throughput_picture(compared(timed("zero3", 1.0), timed("fsdp", 0.5)))
    assert [row["value"] for row in rows_of(picture)] == [2048, 1024]
    assert "throughput, tokens/s" in texts(picture)


def test_lines_are_the_range_of_few_runs_and_the_interval_of_the_median_of_many() -> None:
    few = [timed("ddp", 0.5), *(timed("fsdp", 1 / speed, repeat=n) for n, speed in enumerate((1, 2, 3)))]
    by_name = {row["name"]: row for row in rows_of(throughput_picture(compared(*few)))}
    assert (by_name["fsdp"]["low"], by_name["fsdp"]["high"]) == (pytest.approx(50), pytest.approx(150))
    assert by_name["ddp"]["low"] is None
    many = [timed("ddp", 0.5), *(timed("fsdp", 1 / (1 + n), repeat=n) for n in range(9))]
    (fsdp,) = [row for row in rows_of(throughput_picture(compared(*many))) if row["name"] == "fsdp"]
    assert 50 < fsdp["low"] < fsdp["value"] < fsdp["high"] < 450


def test_one_backend_alone_is_compared_with_nothing() -> None:
    assert throughput_picture(compared(timed("ddp", 0.5))) is None


def test_alternative_text_names_the_figures() -> None:
    picture = made(throughput_picture(compared(timed("zero3", 1.0), timed("ddp", 0.5))))
    assert "2 ranks: ddp 100 % = 2,048 tokens/s, zero3 50 %" in picture.alt
    assert "One run each" in picture.caption


def test_lines_over_several_occasions_do_not_say_what_is_in_no_order() -> None:
    runs = [timed(label, 0.5, repeat=n) for label in ("ddp", "fsdp") for n in range(2)]
    apart = [
        run.model_copy(update={"created_at": f"2026-01-0{run.repeat + 1}T10:00:00+00:00"}) for run in runs
    ]
    one, several = (throughput_picture(compared(*of)) for of in (runs, apart))
    assert one is not None
    assert several is not None
    assert one.caption.endswith("cells whose lines overlap are in no order.")
    assert several.caption.endswith("over all occasions; cells are compared within each.")
