"""Checks of traced steps: computing and communication are seen, add up, and are what was counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import SHARDED, Evidence, Kernels
from harness.forms.terms import STEP_PHASES
from harness.judge.measures import all_ranks_counted
from harness.record import Record
from harness.traces.kinds import KERNELS, STEP, is_communication

NO_CUPTI = "it has no CUPTI"
ADDS_UP = 0.01


def steps_divide(evidence: Evidence) -> Finding:
    """Computing, exposed communication and idling of each traced step."""
    record = evidence.records[SHARDED]
    for rank in record.ranks:
        if not rank.overlap:
            return "failed", f"rank {rank.rank} has no traced step"
        for part in rank.overlap:
            communicates = part.communication_seconds > 0 or evidence.ranks == 1
            if part.compute_seconds <= 0 or not communicates:
                return "failed", (
                    f"rank {rank.rank}, step {part.step}: computing {part.compute_seconds:.6f} s, "
                    f"communication {part.communication_seconds:.6f} s"
                )
            total = part.compute_seconds + part.exposed_seconds + part.idle_seconds
            # Copies that run alone are the rest of the step.
            rest = part.seconds - total
            most = (part.copy_seconds or 0.0) + ADDS_UP * part.seconds
            if not -ADDS_UP * part.seconds <= rest <= most:
                return (
                    "failed",
                    f"rank {rank.rank}: parts are {total:.6f} s of a step of {part.seconds:.6f} s",
                )
    computing = record.ranks[0].overlap[-1]
    return "ok", f"computing is {computing.compute_seconds / computing.seconds:.0%} of a step"


def kernels_are_counted(evidence: Evidence) -> Finding:
    """Kernels of NCCL in a traced step against the collectives counted in a probed one."""
    record, kernels = evidence.records[SHARDED], evidence.kernels.get(SHARDED, {})
    expected = collectives_per_step(record)
    if not kernels or not expected:
        return "failed", "no trace was kept, or no collective was counted"
    for rank, steps in kernels.items():
        for step, count in steps.items():
            if count != expected.get(rank):
                return "failed", (
                    f"rank {rank}, step {step}: {count} kernels of NCCL, {expected.get(rank)} collectives"
                )
    return held(all(kernels.values()), f"{max(expected.values()):g} a step")


def collectives_per_step(record: Record) -> dict[int, float]:
    """Calls of each rank in a probed step that move something; {} where none was counted."""
    probed = record.windows.probed if record.windows else 0
    if not probed or not all_ranks_counted(record):
        return {}
    calls: dict[int, int] = {}
    for row in record.comm:
        if row.phase in STEP_PHASES and row.group_size > 1:
            calls[row.rank] = calls.get(row.rank, 0) + row.calls
    return {rank: count / probed for rank, count in calls.items()}


def read_kernels(record: Record, folder: Path) -> Kernels:
    """Kernels of NCCL in each traced step, from the traces that a run kept."""
    return {
        artifact.rank: count_kernels(json.loads((folder / artifact.path).read_bytes()))
        for artifact in record.artifacts
        if artifact.kind == "trace" and artifact.rank is not None
    }


def count_kernels(trace: dict[str, Any]) -> dict[int, int]:
    """By step; a kernel belongs to the step in which it begins, since a step ends when the device is done."""
    events = trace.get("traceEvents", ())
    steps = {
        int(event["name"].removeprefix(STEP)): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(STEP)
    }
    begins = [
        event["ts"]
        for event in events
        if event.get("cat") in KERNELS and is_communication(event["cat"], str(event.get("name", "")))
    ]
    return {step: sum(begin <= at < end for at in begins) for step, (begin, end) in steps.items()}


CHECKS = (
    Check(
        id="trace", question="Does a traced step divide into computing, communication and idling?",
        tolerance=f"adds up to {ADDS_UP:.0%}", judge=steps_divide, runs=(SHARDED,), not_on_stub=NO_CUPTI,
    ),
    Check(
        id="kernels", question="Does each collective that was counted run a kernel of NCCL?",
        tolerance="equal numbers", judge=kernels_are_counted, runs=(SHARDED,), least_ranks=2,
        not_on_stub=NO_CUPTI,
    ),
)  # fmt: skip
