"""What Slurm knows of the jobs that ran the cells."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.report.document import Column, Folded, Table, plain
from harness.report.formats import megabytes, number
from harness.report.tables import LABELS

FACTS = (
    Column("job", "job", plain, align="left", optional=True),
    Column("state", "state", plain, align="left", optional=True),
    Column("attempts", "attempts", optional=True),
    Column("restarts", "restarts", optional=True),
    Column("elapsed_seconds", "elapsed s", number, optional=True),
    Column("energy_joules", "energy J", number, optional=True),
    Column("max_resident_bytes", "largest process MB", megabytes, optional=True),
)


def slurm_jobs(comparison: Comparison) -> Folded | None:
    """The jobs, with what at least one of them has; None where no run was a job of `harness slurm`."""
    jobs = [(row, slurm) for row in comparison.rows if (slurm := row.record.environment.slurm) is not None]
    if not jobs:
        return None
    body = [[*row.cell, row.record.repeat, *(getattr(job, c.key) for c in FACTS)] for row, job in jobs]
    columns = (*LABELS, Column("repeat", "repeat"), *FACTS)
    table = Table(key="slurm_jobs", columns=columns, rows=body)
    return Folded(f"Slurm jobs: {len(jobs)}", [table])
