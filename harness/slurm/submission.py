"""Hands a matrix to Slurm, no more jobs at once than a limit, and remembers which job is which run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.file_lock import NO_LOCKS
from harness.files import read_plain, write_atomically
from harness.record.record_files import RECORD_NAME
from harness.slurm import client
from harness.slurm.attempt import noted_job
from harness.slurm.matrix import Matrix, PlannedRun

JOBS_NAME = "jobs.json"
LOCK_NAME = "submit.lock"


class AnotherSubmission(HarnessError):
    """A folder whose runs another process is submitting."""


class SubmittedJob(BaseModel):
    """Which job runs which run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    job: str
    """As Slurm names it: 12, or 12_3 for element 3 of array 12."""


_JOBS = TypeAdapter(list[SubmittedJob])


def read_jobs(folder: Path) -> dict[str, str]:
    """Job by run id, of all that was submitted. Raises HarnessError where the note of it cannot be read."""
    path = folder / JOBS_NAME
    try:
        return {
            entry.run_id: entry.job for entry in _JOBS.validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise HarnessError(
            f"{path}, which notes the jobs that were submitted, cannot be read: jobs that have not begun are "
            "not known, and none is submitted; cancel them with scancel, then remove the file"
        ) from error


def known_jobs(folder: Path, matrix: Matrix) -> dict[str, str]:
    """Job by run id, also of jobs that began after a submission was cut short before it could note them.

    Where the note of submissions cannot be read, of the jobs that have begun.
    """
    jobs: dict[str, str] = {}
    for run in matrix.runs:
        job = noted_job(matrix.run_directory(run)).job
        if isinstance(job, str):
            jobs[run.request.run_id] = job
    with suppress(HarnessError):
        jobs |= read_jobs(folder)
    return jobs


def unsubmitted(folder: Path, matrix: Matrix) -> list[PlannedRun]:
    """Runs that have neither a job nor a record, in order. Raises HarnessError as `read_jobs` does."""
    read_jobs(folder)
    jobs = known_jobs(folder, matrix)
    return [
        run
        for run in matrix.runs
        if run.request.run_id not in jobs and not os.path.exists(matrix.run_directory(run) / RECORD_NAME)
    ]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other submissions out of a folder, which would submit the same runs again.

    Raises AnotherSubmission where one is at work, HarnessError where the folder cannot be written. Where the
    file system has no locks, nothing is kept out.
    """
    lock = FileLock(folder / LOCK_NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise AnotherSubmission(
            f"'{folder}': another `harness slurm submit` is submitting its runs; wait until it has done so"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise HarnessError(f"{folder / LOCK_NAME} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def submit_runs(
    folder: Path, matrix: Matrix, runs: Sequence[PlannedRun], on_job: Callable[[str, int], None]
) -> int:
    """Submit runs in order while the queue has room; return how many were submitted.

    `on_job` gets each job and its number of runs. The queue is asked once; what else the user submits
    meanwhile is not counted. Raises HarnessError as soon as sbatch refuses, with what was submitted noted.
    """
    room = max(0, matrix.site.max_queued_jobs - client.queued_jobs())
    submitted = 0
    if runs[:room]:
        _remember(folder, {})  # a job that could not be noted would be lost
    for batch in _batches(runs[:room]):
        for run in batch:
            prepare_run(matrix, run)
        indices = [run.array_index for run in batch if run.array_index is not None]
        job = client.submit(folder / batch[0].script, array=ranges(indices) if indices else None)
        named = [job if run.array_index is None else f"{job}_{run.array_index}" for run in batch]
        _remember(folder, {run.request.run_id: name for run, name in zip(batch, named, strict=True)})
        on_job(job, len(batch))
        submitted += len(batch)
    return submitted


def prepare_run(matrix: Matrix, run: PlannedRun) -> None:
    """Make a run's folder and write its request. Raises HarnessError where it cannot be written."""
    directory = matrix.run_directory(run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        run.request.write(directory)
    except OSError as error:
        raise HarnessError(f"run folder '{directory}' cannot be written: {error.strerror}") from error


def ranges(indices: Sequence[int]) -> str:
    """Ascending indices as sbatch's --array takes them: 0-3,5."""
    pieces = []
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        pieces.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(pieces)


def _batches(runs: Sequence[PlannedRun]) -> Iterator[list[PlannedRun]]:
    """Neighbours of one script together."""
    for _, batch in groupby(runs, key=lambda run: run.script):
        yield list(batch)


def _remember(folder: Path, jobs: dict[str, str]) -> None:
    merged = read_jobs(folder) | jobs
    entries = [SubmittedJob(run_id=run_id, job=job) for run_id, job in merged.items()]
    try:
        write_atomically(folder / JOBS_NAME, _JOBS.dump_json(entries, indent=1).decode())
    except OSError as error:
        taken = f"; these jobs were submitted: {', '.join(jobs.values())}" if jobs else ""
        raise HarnessError(f"{folder / JOBS_NAME} cannot be written: {error.strerror}{taken}") from error
