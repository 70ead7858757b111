"""Brings the runs of a matrix together: who still runs, and a record for every one that does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.record import Record
from harness.request import REQUEST_NAME
from harness.slurm import client
from harness.slurm.attempt import write_run
from harness.slurm.client import JobFacts
from harness.slurm.matrix import Matrix, PlannedRun
from harness.slurm.submission import known_jobs
from harness.store import RECORD_NAME, read_record


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where one run of the matrix is."""

    run: PlannedRun
    job: str | None
    facts: JobFacts | None
    record: Record | None

    @property
    def phase(self) -> str:
        """'not submitted', Slurm's state in small letters while the job lives, 'ended' or 'recorded'."""
        if self.facts is not None and self.facts.active:
            return self.facts.state.lower()
        if self.record is not None:
            return "recorded"
        return "not submitted" if self.job is None else "ended"

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
    from what its ranks left behind.
    """
    states = []
    for state in look(folder, matrix):
        over = state.job is not None and (state.facts is None or not state.facts.active)
        if over and not _complete(state):
            directory = matrix.run_directory(state.run)
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / REQUEST_NAME).exists():
                state.run.request.write(directory)
            record = write_run(directory, state.run.request, _with_names(state.facts), state.job)
            state = RunState(run=state.run, job=state.job, facts=state.facts, record=record)
        states.append(state)
    return states


def _complete(state: RunState) -> bool:
    """Whether the record cannot become better."""
    if state.record is None:
        return False
    return state.facts is None or "state" in state.record.environment.get("slurm", {})


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
    path = run_directory / RECORD_NAME
    try:
        return read_record(path) if path.exists() else None
    except HarnessError:
        return None
