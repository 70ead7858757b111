"""Recognises a job that Slurm started again, so that a comparison goes on where its last attempt ended."""

from __future__ import annotations

import os
from collections.abc import Iterable

from harness.record import Record


def requeued_job() -> str | None:
    """Number of the job that this process runs in if Slurm has started it before, else None.

    Slurm sets SLURM_RESTART_COUNT after a requeue only, and the job keeps its number.
    """
    return os.environ.get("SLURM_JOB_ID") if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else None


def made_in_job(records: Iterable[Record], job: str) -> list[Record]:
    """Those of the records that an attempt of this job made."""
    return [r for r in records if r.environment.variables.get("SLURM_JOB_ID") == job]
