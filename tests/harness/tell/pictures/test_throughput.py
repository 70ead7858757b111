"""Bars relative to DDP: their values, intervals and names."""

import pytest

from harness.tell.pictures.plots import throughput_picture
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


def test_without_ddp_the_first_that_is_listed_is_the_base() -> None:
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
