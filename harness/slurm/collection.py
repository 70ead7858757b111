"""Brings the runs of a matrix together: who still runs, and a record for every one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.record import Record
from harness.record.record_files import RECORD_NAME
from harness.record.store import Store, read_record
from harness.run_directory.request import REQUEST_NAME
from harness.slurm import client
from harness.slurm.attempt import write_run
from harness.slurm.client import JobFacts
from harness.slurm.matrix import Matrix, PlannedRun
from harness.slurm.submission import known_jobs, prepare_run


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
    return JobFacts(**(vars(facts) | {"nodes": ",".join(names)}))


def _record(run_directory: Path) -> Record | None:
    try:
        return read_record(run_directory / RECORD_NAME)
    except HarnessError:
        return None
