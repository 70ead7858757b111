"""All checks, in the order in which they are shown."""

from __future__ import annotations

from harness.doctor.gpu import amounts, devices, durations, failures, rates, same_job, traces
from harness.doctor.gpu.check import Answer, Check, answer
from harness.doctor.gpu.evidence import Evidence

CHECKS: tuple[Check, ...] = (
    *devices.CHECKS, *same_job.CHECKS, *amounts.CHECKS, *durations.CHECKS, *traces.CHECKS, *rates.CHECKS,
    *failures.CHECKS,
)  # fmt: skip


def answer_all(evidence: Evidence) -> list[Answer]:
    """An answer to every check."""
    return [answer(check, evidence) for check in CHECKS]
