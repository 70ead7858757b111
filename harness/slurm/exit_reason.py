"""Why a job ended, from what its own script noticed and what Slurm says: a pure function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from harness.fabric.gate import parse_rate, shortfall
from harness.fabric.result import FabricResult
from harness.run_directory.assemble import Verdict
from harness.slurm.client import JobFacts

Noticed = Literal["time-limit", "terminated", "slow-fabric", "fabric-failed"]


class ScriptEnd(BaseModel):
    """What the job's script wrote down at its end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        return Verdict(status="failed", kind="Terminated", cause="told to end by SIGTERM")
    if end is None and facts is not None and not facts.active:
        code = facts.exit_code
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"over, exit code {code}"
        return Verdict(status="failed", kind="ScriptLost", cause=f"left alone: the job script was {how},")
    return None


def _missed(end: ScriptEnd, fabric: FabricResult | None) -> str:
    """By how much the network missed what was asked of it, and the usual causes."""
    missed = None
    if fabric is not None and end.require_busbw is not None:
        missed = shortfall(fabric, parse_rate(end.require_busbw))
    return missed or "the network is slower than the site's require_busbw"
