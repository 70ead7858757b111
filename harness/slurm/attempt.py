"""What a job's script does on its first node before and after the step: one attempt at one run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError
from harness.fabric.result import FABRIC_NAME, FabricResult, parse_rate, shortfall
from harness.files import Stored, write_atomically
from harness.record import Record, SlurmPart
from harness.record.store import write_record
from harness.run_directory.assemble import Outcome, Verdict, assemble, noted_exits
from harness.run_directory.events import ENDINGS, SetupEvent, Tail
from harness.run_directory.rank_state import log_tail, read_log, read_part
from harness.run_directory.request import (
    REQUEST_NAME,
    RunRequest,
    launcher_log,
    rank_file,
)
from harness.slurm.client import JobFacts

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
    if (end is not None and end.ended == "time-limit") or state in ("TIMEOUT", "DEADLINE"):
        return Verdict(status="timeout", kind="TimeLimit", cause="stopped by the job's time limit")
    match state:
        case "OUT_OF_MEMORY":
            return Verdict(status="oom", kind="OutOfMemory", cause="ended by Slurm: a node ran out of memory")
        case "NODE_FAIL" | "BOOT_FAIL":
            named = f" ({', '.join(silent_hosts)})" if silent_hosts else ""
            return Verdict(
                status="failed", kind="NodeFailure", cause=f"ended by the failure of a node{named}"
            )
        case "PREEMPTED":
            return Verdict(status="failed", kind="Preempted", cause="preempted by another job")
        case "CANCELLED":
            return Verdict(status="failed", kind="Cancelled", cause="cancelled")
    if memory_notice is not None:
        return Verdict(status="oom", kind="OutOfMemory", cause=f"ended by Slurm ({memory_notice})")
    if end is not None and end.ended == "slow-fabric":
        return Verdict(status="failed", kind="SlowFabric", cause=f"not begun: {_missed(end, fabric)}; ended")
    if end is not None and end.ended == "fabric-failed":
        cause = (
            f"not begun: the self-test of the network that require_busbw asks for ended with exit code "
            f"{end.exit_code} and left no result that can be read (launcher.log has its output); ended"
        )
        return Verdict(status="failed", kind="FabricFailed", cause=cause)
    if end is not None and end.ended == "terminated":
        return Verdict(status="failed", kind="Terminated", cause="terminated by SIGTERM")
    if end is None and facts is not None and not facts.active:
        code = facts.exit_code
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"over, exit code {code}"
        return Verdict(status="failed", kind="ScriptLost", cause=f"abandoned: the job script was {how},")
    return None


def _missed(end: ScriptEnd, fabric: FabricResult | None) -> str:
    """By how much the network missed what was asked of it, and the usual causes."""
    missed = None
    if fabric is not None and end.require_busbw is not None:
        missed = shortfall(fabric, parse_rate(end.require_busbw))
    return missed or "the network is slower than the site's require_busbw"


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
    write_atomically(run_directory / JOB_NAME, _job_variables().model_dump_json(indent=1))


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
    silent = _silent_hosts(run_directory, request)
    notice = out_of_memory_notice(read_log(launcher_log(run_directory)))
    outcome = Outcome(
        exit_codes=_exit_codes(run_directory, request),
        verdict=verdict(facts, end, silent, notice, fabric),
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


def _job_variables() -> SlurmPart:
    """What the script's own environment says of its job."""
    number, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return SlurmPart(
        job=f"{number}_{task}" if number and task else os.environ.get("SLURM_JOB_ID"),
        nodes=os.environ.get("SLURM_JOB_NODELIST"),
        partition=os.environ.get("SLURM_JOB_PARTITION"),
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )


def noted_job(run_directory: Path) -> SlurmPart:
    """What the script of a run wrote down of its job at the beginning; empty if it has not begun."""
    return read_part(run_directory / JOB_NAME, SlurmPart) or SlurmPart()


def _exit_codes(run_directory: Path, request: RunRequest) -> dict[int, int | None]:
    """Exit codes by rank as their monitors noted them, the first to end first.

    Launchers end the ranks that are left with SIGTERM: one that went so did not fail.
    """
    noted = noted_exits(run_directory, range(request.world_size))
    return {rank: end.exit_code for rank, end in noted.items() if end.exit_code != -signal.SIGTERM}


def _silent_hosts(run_directory: Path, request: RunRequest) -> list[str]:
    """Hosts of the ranks that began and did not say how they ended."""
    hosts = []
    for rank in range(request.world_size):
        events = Tail(rank_file(run_directory, rank)).read()
        setup = next((event for event in events if isinstance(event, SetupEvent)), None)
        if setup is not None and not any(isinstance(event, ENDINGS) for event in events):
            hosts.append(setup.host)
    return sorted(set(hosts))
