"""Comparisons of which the right findings are known."""

from pathlib import Path

from benchmarks import false_alarms
from benchmarks.false_alarms import IDLE, LOADED, judge_all, table
from harness.record.store import write_record
from tests.records import ENVIRONMENT, make_record
from tests.timed_records import phases, processors, ranks, run, steps

TWO_CORES = ENVIRONMENT | {"cores": 2}


def keep(place: Path, **changes: object) -> None:
    """Records of a comparison of two cells."""
    alone = ranks(1, processors=processors())
    records = [make_record(steps=steps(), ranks=alone), run(environment=TWO_CORES, **changes)]
    for number, record in enumerate(records):
        directory = place / str(number)
        directory.mkdir(parents=True)
        write_record(directory, record)


def test_only_a_busy_machine_is_right_next_to_a_program_that_takes_a_core(tmp_path: Path) -> None:
    busy = [rank.model_copy(update={"processors": processors(machine_busy_seconds=12.0)}) for rank in ranks()]
    keep(tmp_path / IDLE / "00")
    keep(tmp_path / LOADED / "00", ranks=busy)
    judged = judge_all(tmp_path)
    assert false_alarms.false_alarms(judged) == []
    assert "0.00 to 1.00" in table(judged)


def test_what_should_not_be_found_and_what_is_missing_are_named(tmp_path: Path) -> None:
    keep(tmp_path / IDLE / "00", ranks=ranks(phase_seconds=phases(0.3)))
    keep(tmp_path / LOADED / "07")
    assert false_alarms.false_alarms(judge_all(tmp_path)) == [
        "idle 00: slow-rank (1)",
        "loaded 07: no busy-machine",
    ]
