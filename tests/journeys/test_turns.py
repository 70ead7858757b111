"""Two cells that take turns, from the comparison to a verified report."""

import json

import pytest

from tests.harness.cli.command_line import SMALL
from tests.journeys.journey import Journey

pytestmark = [pytest.mark.long(seconds=10), pytest.mark.costly]
TURNS = [
    *SMALL, "--set", "compare.turns=3", "--set", "compare.noise_runs=false", "--set", "training.steps=10",
    "--set", "measure.warmup_steps=1", "--set", "measure.probed_steps=1",
]  # fmt: skip
TIMED = 7


def test_turns_are_taken_recorded_and_reported(journey: Journey) -> None:
    done = journey.harness("compare", "--backends", "ddp,fsdp", *TURNS, "--report", "report.md", "--json")
    rows = {row["backend"]: row for row in json.loads(done.stdout)["rows"]}
    assert {rows[name]["parity"] for name in ("ddp", "fsdp")} <= {"exact", "tight"}
    records = {record.backend.label: record for record in journey.records()}
    places = []
    for record in records.values():
        turns = record.turns
        assert (record.status, record.windows.timed) == ("ok", TIMED)
        assert turns.steps == 3
        assert turns.beside == sorted(other.run_id for other in records.values() if other is not record)
        assert len(turns.places) == 3
        places += turns.places
        for rank in record.ranks:
            assert rank.timed_probes == []
            assert rank.memory
            assert rank.overlap
        # Whoever spins uses at least one processor for as long as it waits.
        assert turns.waited_process_seconds < 0.1 * turns.waited_seconds
    assert sorted(places) == list(range(9))
    assert "2 of 3" not in journey.harness("compare", "--backends", "ddp,fsdp", *TURNS).stderr
    assert "3 of 3 cells have a record" in journey.harness("compare", "--backends", "ddp,fsdp", *TURNS).stderr
    assert "fsdp" in journey.harness("list").stdout
    assert records["ddp"].run_id in journey.harness("show", records["ddp"].run_id).stdout
    journey.harness("report", "runs", "-o", "again.md")
    assert "records unchanged" in journey.harness("verify", "again.md").stdout
