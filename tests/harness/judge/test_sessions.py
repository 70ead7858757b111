from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.judge.run_conditions import Spread, sessions, spread
from harness.record import Record
from harness.record.measured import SlurmPart
from harness.tell.tables import ONE_SESSION, sessions_words
from tests.records import ENVIRONMENT, make_record, make_steps


def at(time: str, label: str = "ddp", *, seconds: float = 0.5, host: str = "host", **facts: Any) -> Record:
    record = make_record(label=label, steps=make_steps(seconds=seconds), environment=ENVIRONMENT | facts)
    ranks = [rank.model_copy(update={"host": host}) for rank in record.ranks]
    return record.model_copy(update={"created_at": f"2026-01-0{time}:00.000+00:00", "ranks": ranks})


def test_a_pause_of_more_than_an_hour_begins_a_session() -> None:
    runs = [at("2T09:30"), at("1T10:00"), at("1T10:59"), at("1T11:59"), at("1T13:01")]
    assert sessions(runs) == [2, 0, 0, 0, 1]


def test_a_run_that_lasts_for_hours_is_no_pause() -> None:
    assert sessions([at("1T10:00", seconds=1800.0), at("1T12:30")]) == [0, 0]
    assert sessions([at("1T10:00"), at("1T12:30")]) == [0, 1]


def test_what_a_scheduler_began_later_counts_from_then() -> None:
    begun = {"started_at": "2026-01-01T18:00:00+00:00"}
    assert sessions([at("1T10:00"), at("1T10:00", **begun)]) == [0, 1]


def test_hosts_that_ran_several_cells_are_sessions_of_their_own() -> None:
    runs = [at(f"1T10:0{n}", label, host=host) for n, (label, host) in enumerate(
        [("ddp", "a"), ("ddp", "b"), ("fsdp", "a"), ("fsdp", "b")]
    )]  # fmt: skip
    assert sessions(runs) == [0, 1, 0, 1]


def test_hosts_that_tell_nothing_about_cells_are_one_session() -> None:
    """A container for each run has a name of its own; a scheduler places runs where it likes."""
    assert sessions([at("1T10:00", label, host=label) for label in ("ddp", "fsdp", "zero1")]) == [0, 0, 0]
    slurm = {"slurm": SlurmPart(job="1").model_dump()}
    placed = [at("1T10:00", label, host=host, **slurm) for label in ("ddp", "fsdp") for host in "ab"]
    assert sessions(placed) == [0, 0, 0, 0]


def test_a_record_without_a_time_belongs_to_the_first_session() -> None:
    unknown = at("1T10:00").model_copy(update={"created_at": "yesterday"})
    assert sessions([at("2T10:00"), unknown, at("1T10:00")]) == [1, 0, 0]
    assert sessions([unknown]) == [0]
    assert sessions([]) == []


def test_spread_between_sessions_stands_beside_that_within_one() -> None:
    found = spread({0: [0.9, 1.0, 1.1], 1: [1.95, 2.0], 4: [1.1]})
    assert found.sessions == 3
    assert found.within == pytest.approx(0.2 / 1.1)
    assert found.between == pytest.approx((1.975 - 1.0) / 1.1)


def test_spread_of_too_few_runs_is_not_zero() -> None:
    assert spread({0: [1.0]}) == Spread(sessions=1, within=None, between=None)
    assert spread({0: [1.0], 1: [1.0]}) == Spread(sessions=2, within=None, between=0.0)
    assert spread({}) == Spread(sessions=0, within=None, between=None)


def test_a_comparison_says_in_how_many_sessions_it_was_timed() -> None:
    one = Comparison([at("1T10:00"), at("1T10:10")])
    assert (one.sessions, sessions_words(one.sessions)) == (1, ONE_SESSION)
    two = Comparison([at("1T10:00"), at("2T10:00")])
    assert two.sessions == 2
    assert "compared within each" in sessions_words(two.sessions)
