"""Hands a matrix to Slurm, remembers which job is which run, and brings the runs together.

No more jobs at once than a limit. Whether the runs will have the memory that they need is judged before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.files import Stored, read_plain, refusing, write_atomically
from harness.gpus.found import Wheel, read_wheel, unfit_wheel
from harness.launch.cells import is_refused
from harness.launch.external import claimed
from harness.plan.hardware import load_hardware
from harness.plan.limits import MemoryLimits
from harness.plan.preflight import CellPredictions, of_requests, predict_runs
from harness.record import Record
from harness.record.store import RECORD_NAME, Store, read_record, write_record
from harness.run_directory.assemble import assemble_refused
from harness.run_directory.request import REQUEST_NAME
from harness.slurm import client
from harness.slurm.attempt import noted_job, write_run
from harness.slurm.client import JobFacts
from harness.slurm.matrix import Matrix, PlannedRun, Site

JOBS_NAME = "jobs.json"


class AnotherSubmission(HarnessError):
    """A folder whose runs another process is submitting."""


class SubmittedJob(Stored):
    """Which job runs which run."""

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


def alone(folder: Path) -> AbstractContextManager[None]:
    """Keep other submissions out of a folder, which would submit the same runs again.

    Raises AnotherSubmission where one is at work, else as `claimed`.
    """

    def refuse() -> None:
        raise AnotherSubmission(
            f"'{folder}': another `harness slurm submit` is submitting its runs; wait until it has done so"
        )

    return claimed(folder, "submit", refuse)


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
    with refusing(f"run folder '{directory}' cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        run.request.write(directory)


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


UNIT_BYTES = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Of sbatch's --mem, which counts in MiB without a unit."""


def site_limits(site: Site, gpu: str | None = None) -> MemoryLimits:
    """Memory of a site's nodes and GPUs, as far as its file says.

    `gpu` goes before the site's. Raises HarnessError for a GPU that no table knows.
    """
    name = gpu or site.gpu
    device = load_hardware().device(name) if name is not None and site.device == "cuda" else None
    return MemoryLimits(
        device_bytes=device.memory_bytes if device else None,
        device=device,
        host_bytes=memory_bytes(site.memory_per_node),
    )


def unfit_software(site: Site, gpu: str | None = None) -> str | None:
    """Why the torch of a site's virtual environment cannot compute on the site's GPUs.

    None: it can, or the environment or the GPU is not known here. Raises HarnessError for a GPU that no table
    knows.
    """
    device, wheel = site_limits(site, gpu).device, site_wheel(site)
    if device is None or device.capability is None or wheel is None:
        return None
    major, minor = map(int, device.capability.split("."))
    unfit = unfit_wheel(wheel, (major, minor))
    return f"site '{site.name}' has {device.name}: {unfit}" if unfit else None


def site_wheel(site: Site) -> Wheel | None:
    """The torch that the ranks import; None: the site names no environment that can be seen from here."""
    if site.virtual_environment is None or site.container:
        return None
    folders = Path(site.virtual_environment).glob("lib/python3*/site-packages/torch/version.py")
    return next(map(read_wheel, sorted(folders)), None)


def memory_bytes(text: str | None) -> int | None:
    """Bytes of a value of --mem; None for 0, which is all of a node."""
    if text is None:
        return None
    unit = text[-1].upper() if text[-1].isalpha() else ""
    return int(text.removesuffix(text[-1]) if unit else text) * UNIT_BYTES[unit] or None


def predict_matrix(runs: Sequence[PlannedRun], limits: MemoryLimits, *, force: bool) -> CellPredictions:
    """Predict runs that are about to be submitted, by their run ids."""
    return predict_runs(of_requests([run.request for run in runs], limits), limits, force=force)


def with_prediction(run: PlannedRun, predicted: CellPredictions) -> PlannedRun:
    """The run with its prediction in the request, which the record takes over."""
    part = predicted.parts.get(run.request.run_id)
    request = run.request.model_copy(update={"prediction": part})
    return run.model_copy(update={"request": request})


def record_refused(
    matrix: Matrix, runs: Sequence[PlannedRun], predicted: CellPredictions
) -> list[PlannedRun]:
    """Write the records of runs that cannot fit; return the others, with their predictions."""
    others = []
    for run in runs:
        run = with_prediction(run, predicted)
        refusal = predicted.refusal(run.request.run_id)
        if refusal is None:
            others.append(run)
            continue
        prepare_run(matrix, run)
        directory = matrix.run_directory(run)
        write_record(directory, assemble_refused(directory, run.request, refusal))
    return others


def forget_refused(matrix: Matrix) -> None:
    """Remove the records of runs that were refused, so that they can be submitted."""
    for run in matrix.runs:
        path = matrix.run_directory(run) / RECORD_NAME
        with suppress(HarnessError):  # no record
            if is_refused(read_record(path)):
                path.unlink()


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where one run of the matrix is."""

    run: PlannedRun
    job: str | None
    facts: JobFacts | None
    record: Record | None
    problem: str | None = None
    """Why there is no record, in one line, where the run's folder does not give one."""

    @property
    def phase(self) -> str:
        """Slurm's state in small letters while the job lives, else where the run is."""
        if self.facts is not None and self.facts.active:
            return self.facts.state.lower()
        if self.record is not None:
            return "recorded"
        if self.problem is not None:
            return "unreadable"
        return "not submitted" if self.job is None else "ended"

    @property
    def pending(self) -> bool:
        """Whether its job still waits or runs, or has ended without having been collected."""
        return self.phase not in ("recorded", "not submitted", "unreadable")

    def as_json(self) -> dict[str, Any]:
        """One row of `status --json`."""
        return {
            "run_id": self.run.request.run_id,
            "backend": self.run.request.backend,
            "nodes": self.run.nodes,
            "world_size": self.run.request.world_size,
            "job": self.job,
            "phase": self.phase,
            "state": self.facts.state if self.facts else None,
            "reason": self.facts.reason if self.facts else None,
            "status": self.record.status if self.record else None,
            "problem": self.problem,
        }


def look(folder: Path, matrix: Matrix) -> list[RunState]:
    """Where each run is, after one question to Slurm."""
    jobs = known_jobs(folder, matrix)
    facts = client.job_facts(list(jobs.values()))
    return [
        RunState(
            run=run,
            job=jobs.get(run.request.run_id),
            facts=facts.get(jobs.get(run.request.run_id, "")),
            record=_record(matrix.run_directory(run)),
        )
        for run in matrix.runs
    ]


def collect(folder: Path, matrix: Matrix) -> list[RunState]:
    """Write or complete the record of every run whose job is over; return where each run is then.

    A record that knows Slurm's state is left alone. A run whose job Slurm has forgotten gets its record
    from what its ranks left behind. A folder from which no record can be written is named in the run's
    state and keeps the others from nothing.
    """
    states = []
    for state in look(folder, matrix):
        over = state.job is not None and (state.facts is None or not state.facts.active)
        if over and not _complete(state):
            state = _recorded(folder, matrix, state)
        states.append(state)
    return states


def records_of_cells(matrix: Matrix, states: Sequence[RunState]) -> list[tuple[Path, Record]]:
    """The matrix's records with their files, after those that earlier runs of the same jobs left."""
    found = [
        (matrix.run_directory(state.run) / RECORD_NAME, state.record)
        for state in states
        if state.record is not None
    ]
    jobs = {record.job_id for _, record in found}
    own = {record.run_id for _, record in found}
    earlier = [
        (path, record)
        for path, record in Store(matrix.runs_folder).runs()[0]
        if record.job_id in jobs and record.run_id not in own and record.status == "ok"
    ]
    return [*earlier, *found]


def _recorded(folder: Path, matrix: Matrix, state: RunState) -> RunState:
    """The state with the record that its run's folder gives, or with why it gives none."""
    run, directory = state.run, matrix.run_directory(state.run)
    job_log = folder / f"{state.job}.log"
    try:
        if not (directory / REQUEST_NAME).exists():
            prepare_run(matrix, run)
        record = write_run(directory, run.request, _with_names(state.facts), state.job, job_log)
    except HarnessError as error:
        return replace(state, problem=str(error))
    except Exception as error:  # what a pulled plug leaves in the files of a run fails in any way
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return replace(state, problem=f"run folder '{directory}' gives no record: {problem}")
    return replace(state, record=record)


def _complete(state: RunState) -> bool:
    """Whether the record cannot become better."""
    if state.record is None:
        return False
    slurm = state.record.environment.slurm
    return state.facts is None or (slurm is not None and slurm.state is not None)


def _with_names(facts: JobFacts | None) -> JobFacts | None:
    """The facts with the node list written out, where scontrol can."""
    if facts is None or not facts.nodes:
        return facts
    try:
        names = client.expand_nodes(facts.nodes)
    except HarnessError:
        return facts
    return replace(facts, nodes=",".join(names))


def _record(run_directory: Path) -> Record | None:
    try:
        return read_record(run_directory / RECORD_NAME)
    except HarnessError:
        return None
