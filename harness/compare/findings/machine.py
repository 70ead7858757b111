"""Machines that did other work while they were measured."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.findings.finding import Finding, Kind, subject
from harness.compare.rows import Row
from harness.record import Record

KINDS = (
    Kind(
        id="busy-machine",
        title="A run began on a machine that did other work",
        cause="Other programs, or other runs, kept the processors busy before the run began, and may have "
        "gone on.",
        confirm="The values hold the load average of the last minute before the run, the cores, and the "
        "threads of the largest run of the table, which may have run just before. Told where the load is "
        "more than cores and threads together, so a lesser load is no proof of a quiet machine; the report "
        "names the least and the most.",
        fix="Measure on a machine that does nothing else: under Slurm `exclusive: true` in the site file.",
    ),
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """One finding per run that found more load than the run before it can have left."""
    left = max((_threads(row.record) for row in rows), default=0)
    return [finding for row in rows if (finding := _judge(row, left)) is not None]


def _judge(row: Row, left: int) -> Finding | None:
    load = row.record.environment.get("load_average")
    cores = row.record.environment.get("cores")
    if load is None or not cores or load <= cores + left:
        return None
    return Finding(
        id="busy-machine",
        backends=(row.record.backend.label,),
        message=f"{subject(row)}: the machine did other work when the run began",
        values={"load_average": load, "cores": cores, "threads_of_largest_run": left},
    )


def _threads(record: Record) -> int:
    """That compute on one node."""
    return record.world.ranks_per_node * record.world.threads_per_rank
