"""Records for the tests of the short report."""

from typing import Any

from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.sections.choice import ComparisonScope, comparison_scope
from tests.records import make_record, make_steps


def repeats(label: str, *seconds: float, world_size: int = 2) -> list[Record]:
    """A run of the cell for each time of a step."""
    return [
        make_record(
            label=label, repeat=n, run_id=f"{label}-{world_size}-{n}", world_size=world_size,
            steps=make_steps(seconds=s),
        )
        for n, s in enumerate(seconds)
    ]  # fmt: skip


def stage_of(*records: Record) -> ComparisonScope:
    """Of records of which some succeeded."""
    found = comparison_scope(Comparison(records))
    assert found is not None
    return found


def growing(label: str, ranks: int, seconds: float, **changes: Any) -> Record:
    """A run of a job whose batch grows with the ranks, as weak scaling wants it."""
    per_step = {step: {"tokens": 512 * ranks} for step in range(4)}
    return make_record(
        label=label, world_size=ranks, run_id=f"{label}-{ranks}", job_id=f"{ranks:012d}",
        training={"global_batch_size": 4 * ranks}, steps=make_steps(seconds=seconds, changes=per_step),
        **changes,
    )  # fmt: skip
