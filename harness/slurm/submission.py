"""Hands a matrix to Slurm, remembers which job is which run, and brings the runs together.

No more jobs at once than a limit. Whether the runs will have the memory that they need is judged before.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.fabric.result import FABRIC_NAME, FabricResult, parse_rate, shortfall
from harness.files import Stored, read_plain, refusing, write_atomically
from harness.gpus.found import read_wheel, unfit_wheel
from harness.launch.cells import is_refused
from harness.launch.external import claimed
from harness.plan.hardware import MemoryLimits, load_hardware
from harness.plan.preflight import CellPredictions, predict_runs
from harness.record import Record, SlurmPart
from harness.record.store import RECORD_NAME, read_record, write_record
from harness.run_directory.assemble import Outcome, Verdict, assemble, assemble_refused, noted_exits
from harness.run_directory.events import ENDINGS, SetupEvent, Tail
from harness.run_directory.rank_state import log_tail, read_log, read_part
from harness.run_directory.request import REQUEST_NAME, RunRequest, launcher_log, rank_file
from harness.slurm import client
from harness.slurm.client import JobFacts
from harness.slurm.matrix import Matrix, PlannedRun, Site

Noticed = Literal["time-limit", "terminated", "slow-fabric", "fabric-failed"]


class ScriptEnd(Stored):
    """What the job's script wrote down at its end."""

    ended: Noticed | None = None
    """The signal that the script was sent, before its time limit or to end at once, or the gate it met."""
    exit_code: int
    """Of the step that ran the launchers, or of the self-test of the network where that was the last."""
    require_busbw: str | None = None
    """What the gate asked of the network."""


OUT_OF_MEMORY = re.compile(
    r"^slurmstepd\S*: error: (.*(?:exceeded memory limit|oom[-_ ]kill event).*)"
    r"|^srun: error: (.*: Out Of Memory.*)$",
    re.MULTILINE,
)
"""Only the step is over its memory: its job ends as FAILED, and Slurm 22.05 says why in the step's output."""


def out_of_memory_notice(output: str) -> str | None:
    """What Slurm printed about a step that it, or the kernel, ended for its memory; None: nothing.

    slurmstepd writes of limits that it watches itself (OverMemoryKill) and of kills in its cgroup, srun of
    tasks that ended so.
    """
    found = OUT_OF_MEMORY.search(output)
    return (found[1] or found[2]).strip() if found else None


BY_STATE = {
    "NODE_FAIL": ("NodeFailure", "ended by the failure of a node"),
    "BOOT_FAIL": ("NodeFailure", "ended by the failure of a node"),
    "PREEMPTED": ("Preempted", "preempted by another job"),
    "CANCELLED": ("Cancelled", "cancelled"),
}
"""What Slurm's states say of a run that failed from outside."""


def verdict(
    facts: JobFacts | None,
    end: ScriptEnd | None,
    silent_hosts: Sequence[str] = (),
    memory_notice: str | None = None,
    fabric: FabricResult | None = None,
) -> Verdict | None:
    """What ended the job from outside; None: look at what its ranks say.

    `silent_hosts` are nodes of which no rank reported how it ended, `memory_notice` is Slurm's notice of a
    step that was out of memory, `fabric` what the self-test of the network measured.
    """
    state = facts.state if facts is not None else None
    ended = end.ended if end is not None else None

    def failed(kind: str, cause: str) -> Verdict:
        return Verdict(status="failed", kind=kind, cause=cause)

    if ended == "time-limit" or state in ("TIMEOUT", "DEADLINE"):
        return Verdict(status="timeout", kind="TimeLimit", cause="stopped by the job's time limit")
    if state == "OUT_OF_MEMORY":
        return Verdict(status="oom", kind="OutOfMemory", cause="ended by Slurm: a node ran out of memory")
    if state in BY_STATE:
        kind, cause = BY_STATE[state]
        named = f" ({', '.join(silent_hosts)})" if silent_hosts and kind == "NodeFailure" else ""
        return failed(kind, f"{cause}{named}")
    if memory_notice is not None:
        return Verdict(status="oom", kind="OutOfMemory", cause=f"ended by Slurm ({memory_notice})")
    if end is not None and ended == "slow-fabric":
        missed = None
        if fabric is not None and end.require_busbw is not None:
            missed = shortfall(fabric, parse_rate(end.require_busbw))
        missed = missed or "the network is slower than the site's require_busbw"
        return failed("SlowFabric", f"not begun: {missed}; ended")
    if end is not None and ended == "fabric-failed":
        return failed(
            "FabricFailed",
            f"not begun: the self-test of the network that require_busbw asks for ended with exit code "
            f"{end.exit_code} and left no result that can be read (launcher.log has its output); ended",
        )
    if ended == "terminated":
        return failed("Terminated", "terminated by SIGTERM")
    if end is None and facts is not None and not facts.active:
        code = facts.exit_code
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"over, exit code {code}"
        return failed("ScriptLost", f"abandoned: the job script was {how},")
    return None


JOB_NAME = "slurm.json"
END_NAME = "slurm-end.json"


def begin(run_directory: Path) -> None:
    """Note which job runs this run; set the files of an earlier attempt aside, so that it starts clean.

    Raises HarnessError where the run's folder is not to be seen from this node.
    """
    if not (run_directory / REQUEST_NAME).exists():
        raise HarnessError(
            f"'{run_directory}' has no {REQUEST_NAME} on this node: the runs folder must be on a file system "
            "that all nodes share"
        )
    left = [p for p in run_directory.iterdir() if p.is_file() and p.name != REQUEST_NAME]
    if any(p.name.startswith(("rank-", "launcher", JOB_NAME)) for p in left):
        earlier = len(list(run_directory.glob("attempt-*")))
        aside = run_directory / f"attempt-{earlier}"
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
    number, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = SlurmPart(
        job=f"{number}_{task}" if number and task else os.environ.get("SLURM_JOB_ID"),
        nodes=os.environ.get("SLURM_JOB_NODELIST"),
        partition=os.environ.get("SLURM_JOB_PARTITION"),
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )
    write_atomically(run_directory / JOB_NAME, job.model_dump_json(indent=1))


def finish(run_directory: Path, end: ScriptEnd) -> Record:
    """Note how the step ended and write the record; `collect` adds what Slurm says afterwards."""
    write_atomically(run_directory / END_NAME, end.model_dump_json())
    request = RunRequest.read(run_directory)
    return write_run(run_directory, request, None)


def write_run(
    run_directory: Path,
    request: RunRequest,
    facts: JobFacts | None,
    job: str | None = None,
    job_log: Path | None = None,
) -> Record:
    """Assemble and write the record of a run from its ranks' files, its script's and Slurm's facts.

    `job_log` has the words of a script that failed before its ranks or launchers had any.
    """
    end = read_part(run_directory / END_NAME, ScriptEnd)
    fabric = read_part(run_directory / FABRIC_NAME, FabricResult)
    silent = set()
    for rank in range(request.world_size):
        events = Tail(rank_file(run_directory, rank)).read()
        setup = next((event for event in events if isinstance(event, SetupEvent)), None)
        if setup is not None and not any(isinstance(event, ENDINGS) for event in events):
            silent.add(setup.host)
    notice = out_of_memory_notice(read_log(launcher_log(run_directory)))
    # Launchers end the ranks that are left with SIGTERM: one that went so did not fail.
    noted = noted_exits(run_directory, range(request.world_size))
    outcome = Outcome(
        exit_codes={rank: e.exit_code for rank, e in noted.items() if e.exit_code != -signal.SIGTERM},
        verdict=verdict(facts, end, sorted(silent), notice, fabric),
    )
    record = assemble(run_directory, request, outcome)
    known: dict[str, Any] = {
        "attempts": 1 + len(list(run_directory.glob("attempt-*"))),
        "step_exit_code": end.exit_code if end is not None else None,
    }
    if job is not None:
        known["job"] = job
    if facts is not None:
        known |= {name: value for name, value in vars(facts).items() if value is not None}
    added = {
        "slurm": noted_job(run_directory).model_copy(update=known),
        "fabric": fabric.summary() if fabric is not None else None,
    }
    error = record.error
    if error is not None and not error.log_tail and job_log is not None and record.status != "diverged":
        error = error.model_copy(update={"log_tail": log_tail(job_log)})
    record = record.model_copy(
        update={"environment": record.environment.model_copy(update=added), "error": error}
    )
    write_record(run_directory, record)
    return record


def noted_job(run_directory: Path) -> SlurmPart:
    """What the script of a run wrote down of its job at the beginning; empty if it has not begun."""
    return read_part(run_directory / JOB_NAME, SlurmPart) or SlurmPart()


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
    for _, neighbours in groupby(runs[:room], key=lambda run: run.script):
        batch = [*neighbours]
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


def _remember(folder: Path, jobs: dict[str, str]) -> None:
    merged = read_jobs(folder) | jobs
    entries = [SubmittedJob(run_id=run_id, job=job) for run_id, job in merged.items()]
    try:
        write_atomically(folder / JOBS_NAME, _JOBS.dump_json(entries, indent=1).decode())
    except OSError as error:
        taken = f"; these jobs were submitted: {', '.join(jobs.values())}" if jobs else ""
        raise HarnessError(f"{folder / JOBS_NAME} cannot be written: {error.strerror}{taken}") from error


def site_limits(site: Site) -> MemoryLimits:
    """Memory of a site's nodes and GPUs, as far as its file says.

    Raises HarnessError for a GPU that no table knows.
    """
    device = load_hardware().device(site.gpu) if site.gpu is not None else None
    return MemoryLimits(
        device_bytes=device.memory_bytes if device else None,
        device=device,
        host_bytes=memory_bytes(site.memory_per_node),
    )


def unfit_software(site: Site) -> str | None:
    """Why the torch of a site's virtual environment cannot compute on the site's GPUs.

    None: it can, or the environment or the GPU is not known here. Raises HarnessError for a GPU that no table
    knows.
    """
    device = site_limits(site).device
    if device is None or device.capability is None or site.virtual_environment is None or site.container:
        return None
    files = Path(site.virtual_environment).glob("lib/python3*/site-packages/torch/version.py")
    if (wheel := next(map(read_wheel, sorted(files)), None)) is None:
        return None
    major, minor = map(int, device.capability.split("."))
    unfit = unfit_wheel(wheel, (major, minor))
    return f"site '{site.name}' has {device.name}: {unfit}" if unfit else None


def memory_bytes(text: str | None) -> int | None:
    """Bytes of a value of --mem, in MiB without a unit; None for 0, which is all of a node."""
    if text is None:
        return None
    return client.bytes_of(text if text[-1].isalpha() else f"{text}M") or None


def predict_matrix(runs: Sequence[PlannedRun], limits: MemoryLimits, *, force: bool) -> CellPredictions:
    """Predict runs that are about to be submitted, by the keys of their cells."""
    return predict_runs([run.request for run in runs], limits, force=force)


def record_refused(
    matrix: Matrix, runs: Sequence[PlannedRun], predicted: CellPredictions
) -> list[PlannedRun]:
    """Write the records of runs that cannot fit; return the others, with their predictions."""
    others = []
    for run in runs:
        part = predicted.parts.get(run.request.key)
        request = run.request.model_copy(update={"prediction": part})  # which the record takes over
        run = run.model_copy(update={"request": request})
        refusal = predicted.refusal(run.request.key)
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
    records = {}
    for run in matrix.runs:
        with suppress(HarnessError):
            records[run.request.run_id] = read_record(matrix.run_directory(run) / RECORD_NAME)
    return [
        RunState(
            run=run,
            job=jobs.get(run.request.run_id),
            facts=facts.get(jobs.get(run.request.run_id, "")),
            record=records.get(run.request.run_id),
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
        slurm = state.record.environment.slurm if state.record is not None else None
        knows_all = state.record is not None and (state.facts is None or (slurm and slurm.state) is not None)
        is_over = state.job is not None and (state.facts is None or not state.facts.active)
        states.append(_recorded(folder, matrix, state) if is_over and not knows_all else state)
    return states


def _recorded(folder: Path, matrix: Matrix, state: RunState) -> RunState:
    """The state with the record that its run's folder gives, or with why it gives none."""
    run, directory = state.run, matrix.run_directory(state.run)
    job_log, facts = folder / f"{state.job}.log", state.facts
    if facts is not None and facts.nodes:
        with suppress(HarnessError):  # without scontrol the list stays as it is
            facts = replace(facts, nodes=",".join(client.expand_nodes(facts.nodes)))
    try:
        if not (directory / REQUEST_NAME).exists():
            prepare_run(matrix, run)
        record = write_run(directory, run.request, facts, state.job, job_log)
    except HarnessError as error:
        return replace(state, problem=str(error))
    except Exception as error:  # what a pulled plug leaves in the files of a run fails in any way
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return replace(state, problem=f"run folder '{directory}' gives no record: {problem}")
    return replace(state, record=record)
