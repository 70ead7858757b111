"""Checks of what happens when a rank runs out of memory."""

from __future__ import annotations

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import FULL, SHARDED, Evidence
from harness.judge.rows import reason

MOST_SECONDS = 15.0


def lack_is_recorded(evidence: Evidence) -> Finding:
    """One rank asks for more memory than there is while the others wait for it."""
    if FULL not in evidence.records:
        return "skipped", evidence.missing.get(FULL, "the run was not made")
    record = evidence.records[FULL]
    if record.status != "oom":
        return "failed", f"recorded as {record.status}: {reason(record) or 'no reason given'}"
    seconds = evidence.seconds_to_notice
    if seconds is None:
        return "failed", "recorded as oom, but no rank said when"
    return held(seconds <= MOST_SECONDS, f"recorded after {seconds:.1f} s")


def next_run_is_well(evidence: Evidence) -> Finding:
    """The run that follows the one without memory."""
    if FULL not in evidence.records:
        return "skipped", evidence.missing.get(FULL, "the run without memory was not made")
    return "ok", f"{SHARDED} ended as ok"


CHECKS = (
    Check(
        id="out-of-memory", question="Is a lack of memory recorded as such?",
        tolerance=f"oom, within {MOST_SECONDS:.0f} s", judge=lack_is_recorded,
    ),
    Check(
        id="after-out-of-memory", question="Does the next run succeed?", tolerance="ok",
        judge=next_run_is_well, runs=(SHARDED,),
    ),
)  # fmt: skip
