"""What other work took from a run, from the accounts of its ranks."""

import pytest

from harness.judge.quantities import disturbance, is_beyond_noise
from harness.record import ProcessorPart, Record
from tests.records import make_ranks, make_record
from tests.timed_records import processors


def of(*accounts: ProcessorPart | None) -> Record:
    ranks = make_ranks(len(accounts))
    parts = [
        rank.model_copy(update={"processors": account}) for rank, account in zip(ranks, accounts, strict=True)
    ]
    return make_record(label="ddp", world_size=len(accounts), ranks=parts)


def test_what_no_rank_used_went_to_others() -> None:
    found = disturbance(of(processors(machine_busy_seconds=10.0), processors(machine_busy_seconds=10.0)))
    assert found is not None
    assert found.other_cores == pytest.approx(0.5)
    assert (found.lost_seconds, found.lost_by_rank) == (0.0, [0.0, 0.0])


def test_a_rank_loses_no_more_than_it_waited_nor_than_others_used() -> None:
    used = {"machine_busy_seconds": 10.0}
    found = disturbance(of(processors(waiting_seconds=0.5, **used), processors(waiting_seconds=3.0, **used)))
    assert found is not None
    assert found.lost_by_rank == [0.5, 2.0]
    assert found.lost_share == 0.5
    assert found.lost_seconds == 2.0


def test_what_a_hypervisor_took_is_lost_without_waiting() -> None:
    stolen = processors(machine_busy_seconds=7.0, machine_stolen_seconds=1.0, process_seconds=3.5)
    found = disturbance(of(stolen, stolen))
    assert found is not None
    assert found.lost_by_rank == [1.0, 1.0]
    assert found.lost_share == 0.125  # each rank did half of the work, so half of a second
    assert found.other_cores == pytest.approx(0.25)


def test_a_rank_that_waits_for_the_other_lost_nothing() -> None:
    found = disturbance(of(processors(waiting_seconds=2.0), processors(waiting_seconds=2.0)))
    assert found is not None
    assert found.lost_share == 0.0


def test_machines_are_counted_one_by_one_and_the_busiest_is_told() -> None:
    quiet = processors(boot="a", machine_busy_seconds=4.0)
    busy = processors(boot="b", machine_busy_seconds=6.0, waiting_seconds=1.0)
    found = disturbance(of(quiet, busy))
    assert found is not None
    assert found.other_cores == pytest.approx(0.5)
    assert (found.lost_by_rank, found.lost_seconds) == ([0.0, 1.0], 1.0)


def test_a_rank_without_an_account_leaves_the_others_in_doubt() -> None:
    assert disturbance(of(processors(), None)) is None
    assert disturbance(make_record(ranks=[])) is None


def test_three_runs_persist_and_fewer_need_more_than_twice() -> None:
    assert is_beyond_noise([1.3, 1.3, 1.3])
    assert not is_beyond_noise([3.0, 1.9])
    assert is_beyond_noise([3.0, 2.1])
    assert not is_beyond_noise([])
