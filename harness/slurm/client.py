"""Asks Slurm's commands and reads their answers; the only place that starts them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import HarnessError

# Each field ends with '|', whatever its width; none of them holds text that a user chose.
QUEUE_FORMAT = ",".join(
    f"{field}:|"
    for field in ("JobArrayID", "State", "Reason", "exit_code", "RestartCnt", "TimeUsed", "NodeList")
)
ACCOUNT_FIELDS = ("JobID", "State", "ExitCode", "ElapsedRaw", "NodeList", "ConsumedEnergyRaw", "MaxRSS")
ACTIVE = frozenset(
    {
        "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_FED",
        "REQUEUE_HOLD", "RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD",
    }
)  # fmt: skip
NEEDED = ("--partition", "--account", "--qos")
"""What sbatch speaks of where a cluster needs it, or another."""
NO_ANSWER = re.compile(r"Unable to contact slurm controller|Socket timed out")
JOB_NUMBER = re.compile(r"[0-9]+(;.*)?")
TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class SlurmUnavailable(HarnessError):
    """Slurm did not answer; it may do so later."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What Slurm says of one job; None where it does not say."""

    state: str
    """As Slurm names it, such as COMPLETED, TIMEOUT or NODE_FAIL, without what follows it."""
    reason: str | None = None
    exit_code: int | None = None
    """Of the batch script; negative: killed by that signal."""
    nodes: str | None = None
    """As Slurm writes lists: node[1-2]."""
    elapsed_seconds: int | None = None
    restarts: int | None = None
    energy_joules: int | None = None
    max_resident_bytes: int | None = None
    """The largest process of the job."""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


def submit(script: Path, *, array: str | None = None) -> str:
    """Hand a script to sbatch; return the job's number. Raises HarnessError with sbatch's reason."""
    indices = [f"--array={array}"] if array is not None else []
    try:
        answer = _run(["sbatch", "--parsable", *indices, script.name], cwd=script.parent)
    except SlurmUnavailable as error:
        # Not one to try again unseen: the job may be in the queue although the answer was lost.
        raise HarnessError(
            f"{error}; look with squeue whether the job of {script.name} is there before you submit it again"
        ) from error
    except HarnessError as error:
        said = str(error).lower()
        if missing := [option for option in NEEDED if option.removeprefix("--") in said]:
            error.add_note(f"give {' and '.join(missing)} to `harness slurm render`, or in the site file")
        raise
    # Sites put words of their own before sbatch's answer.
    output = (answer.splitlines() or [""])[-1].strip()
    if not JOB_NUMBER.fullmatch(output):
        raise HarnessError(
            f"'sbatch' printed no job number for {script.name} but {output!r}; look with squeue whether the "
            "job is there before you submit it again"
        )
    return output.split(";")[0]


def queued_jobs() -> int:
    """Jobs of this user that wait or run, each element of an array counted."""
    answer = _run(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--Format=JobArrayID:|"])
    return len(answer.split())


def cancel(jobs: Sequence[str]) -> None:
    """Cancel jobs; those that have ended are no error."""
    if jobs:
        _run(["scancel", *jobs])


def expand_nodes(nodes: str) -> list[str]:
    """Names of the nodes of a list such as node[1-2]."""
    return _run(["scontrol", "show", "hostnames", nodes]).split()


def job_facts(jobs: Sequence[str]) -> dict[str, JobFacts]:
    """What Slurm knows of these jobs: accounting where there is some, else the controller's memory.

    A job that neither knows is left out: controllers forget ended jobs after some minutes. Raises
    HarnessError where the controller does not answer: its silence says nothing of the jobs.
    """
    if not jobs:
        return {}
    wanted = set(jobs)
    known: dict[str, JobFacts] = {}
    with suppress(HarnessError):  # there is no accounting
        options = ["--parsable2", "--noheader", f"--format={','.join(ACCOUNT_FIELDS)}"]
        known = read_accounting(_run(["sacct", *options, f"--jobs={','.join(jobs)}"]))
    # The controller knows restarts and the reason of a wait; accounting knows what it has forgotten.
    for job, facts in read_queue(_queue(jobs)).items():
        queued = {name: value for name, value in vars(facts).items() if value is not None}
        known[job] = replace(known.get(job, facts), **queued)
    return {job: facts for job, facts in known.items() if job in wanted}


def read_queue(text: str) -> dict[str, JobFacts]:
    """Facts by job from squeue's lines in QUEUE_FORMAT."""
    found = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) < 7:
            continue
        job, state, reason, status, restarts, elapsed, nodes = values[:7]
        ended = state not in ACTIVE
        found[job] = JobFacts(
            state=state,
            reason=None if reason in ("", "None") else reason,
            # As wait(2) has it: exit code times 256, or the signal.
            exit_code=(-(int(status) & 127) or int(status) >> 8) if ended and status.isdigit() else None,
            nodes=nodes or None,
            elapsed_seconds=time_seconds(elapsed),
            restarts=int(restarts) if restarts.isdigit() else None,
        )
    return found


def read_accounting(text: str) -> dict[str, JobFacts]:
    """Facts by job from sacct's lines of ACCOUNT_FIELDS; steps tell their job's memory and energy."""
    found: dict[str, JobFacts] = {}
    for line in text.splitlines():
        values = line.split("|")
        if len(values) < len(ACCOUNT_FIELDS):
            continue
        name, state, exit_code, elapsed, nodes, energy, memory = values[: len(ACCOUNT_FIELDS)]
        job, _, step = name.partition(".")
        code, _, number = exit_code.partition(":")
        joules = int(energy) if energy.isdigit() and int(energy) > 0 else None
        if not step:
            # 'CANCELLED by 1000' and 'NODE_FAIL' and 'RUNNING'
            found[job] = JobFacts(
                state=state.split()[0] if state else "UNKNOWN",
                exit_code=-int(number) or int(code) if code.isdigit() and number.isdigit() else None,
                nodes=None if nodes in ("", "None assigned") else nodes,
                elapsed_seconds=int(elapsed) if elapsed.isdigit() else None,
                energy_joules=joules,
            )
        elif job in found:
            total = found[job]
            resident = [b for b in (total.max_resident_bytes, bytes_of(memory)) if b is not None]
            energies = [e for e in (total.energy_joules, joules) if e is not None]
            found[job] = replace(
                total,
                max_resident_bytes=max(resident, default=None),
                energy_joules=max(energies, default=None),
            )
    return found


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError as error:
        raise HarnessError(
            f"'{command[0]}' was not found: run this where Slurm's commands are on PATH"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"'{command[0]}' did not answer within 120 s; try again later") from error
    if done.returncode < 0:  # SIGPIPE: the controller closed the connection under it
        raise SlurmUnavailable(f"'{command[0]}' was ended by signal {-done.returncode}; try again later")
    if done.returncode != 0:
        output = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        kind = SlurmUnavailable if NO_ANSWER.search(output) else HarnessError
        raise kind(f"'{command[0]}' refused: {output}")
    return done.stdout


def _queue(jobs: Sequence[str]) -> str:
    """squeue's lines; nothing where the controller has forgotten the jobs.

    A list is refused for one job that is forgotten: the others are then queried one by one, arrays as a unit.
    """
    # Without --array the elements of an array that wait are one line, 12_[3-7], whichever were asked for.
    options = ["--noheader", "--array", "--states=all", f"--Format={QUEUE_FORMAT}"]
    try:
        return _run(["squeue", *options, f"--jobs={','.join(jobs)}"])
    except HarnessError as error:
        if "Invalid job id" not in str(error):
            raise
    if len(jobs) == 1:
        return ""
    return "".join(_queue([number]) for number in dict.fromkeys(job.partition("_")[0] for job in jobs))


def time_seconds(text: str) -> int | None:
    """Seconds of a time as Slurm writes it; None of anything else."""
    match = TIME.fullmatch(text)
    if match is None:
        return None
    days = match[1]
    pieces = [int(piece) for piece in match.groups()[1:] if piece is not None]
    if days is not None:  # hours first
        pieces += [0] * (3 - len(pieces))
    elif len(pieces) == 1:  # minutes
        pieces.append(0)
    seconds = 0
    for piece in pieces:
        seconds = seconds * 60 + piece
    return int(days or 0) * 86400 + seconds


def bytes_of(text: str) -> int | None:
    """Bytes of sacct's '123456K'; None of anything else."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text.rstrip("KMGTkmgt")
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError):
        return None
