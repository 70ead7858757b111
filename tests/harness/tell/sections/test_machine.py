from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.tell.document import Folded, Items
from harness.tell.sections.job import machine_section
from tests.records import ENVIRONMENT, make_record
from tests.timed_records import processors, ranks, run

SLURM = {"job": "7_0", "state": "COMPLETED", "attempts": 2, "restarts": 1, "max_resident_bytes": 3_000_000}


def test_the_least_and_the_most_load_of_a_machine_are_shown() -> None:
    records = [
        make_record(repeat=n, run_id=f"r{n}", environment=ENVIRONMENT | {"load_average": load})
        for n, load in enumerate((1.5, 0.25, 0.5))
    ]
    (items,) = machine_section(Comparison(records)).blocks
    assert isinstance(items, Items)
    facts = dict(item for item in items.items if isinstance(item, tuple))
    assert facts["load before the runs"] == (
        "1.50 before the first, 0.25 to 1.50 before all (average of a minute)"
    )
    assert facts["runs began"] == "from 2026-01-02 03:04 to 2026-01-02 03:04 UTC"


def test_what_other_work_used_is_shown_where_records_tell_it() -> None:
    busy = {"processors": processors(machine_busy_seconds=9.0)}
    used = [rank.model_copy(update=busy) for rank in ranks()]
    (items,) = machine_section(Comparison([run(), run(repeat=1, run_id="r1", ranks=used)])).blocks
    assert isinstance(items, Items)
    assert ("other work during timed steps", "0.00 to 0.25 cores") in items.items


def test_what_slurm_knows_is_a_table_of_what_it_knows() -> None:
    records = [make_record(), make_record(label="ddp", environment=ENVIRONMENT | {"slurm": SLURM})]
    *_, folded = machine_section(Comparison(records)).blocks
    assert isinstance(folded, Folded)
    (table,) = folded.blocks
    assert [column.key for column in table.columns] == [
        "backend", "world_size", "repeat", "job", "state", "attempts", "restarts", "max_resident_bytes"
    ]  # fmt: skip
    assert table.texts() == [["ddp", "2", "0", "7_0", "COMPLETED", "2", "1", "3.00"]]


def test_without_slurm_nothing_is_said_of_it() -> None:
    assert len(machine_section(Comparison([make_record()])).blocks) == 1


@pytest.mark.parametrize(
    ("git", "words"),
    [
        ({"modified": False, "changed": []}, "commit ffffffffffff"),
        ({"modified": True}, "commit ffffffffffff with local changes"),
        (
            {"modified": True, "changed": ["backends/a.py", "harness/b.py"]},
            "commit ffffffffffff with local changes to backends/a.py and harness/b.py",
        ),
    ],
)
def test_local_changes_are_named_where_the_record_names_them(git: dict[str, Any], words: str) -> None:
    environment = ENVIRONMENT | {"git": {"commit": "f" * 40} | git}
    (items,) = machine_section(Comparison([make_record(environment=environment)])).blocks
    assert isinstance(items, Items)
    assert ("harness code", f"0123456789ab, {words}") in items.items
