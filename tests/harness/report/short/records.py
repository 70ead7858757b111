"""Records for the tests of the short report."""

from harness.compare.comparison import Comparison
from harness.record import Record
from harness.report.short.stage import Stage, stage
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


def stage_of(*records: Record) -> Stage:
    """Of records of which some succeeded."""
    found = stage(Comparison(records))
    assert found is not None
    return found
