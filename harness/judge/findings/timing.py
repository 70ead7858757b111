"""Speed that was not measured."""

from __future__ import annotations

from harness.judge import measures
from harness.judge.findings.finding import Finding, labels
from harness.judge.repeats import Runs


def find(runs: Runs) -> list[Finding]:
    """Successful runs that were too short for a timed step, in one finding; none is timed on a CUDA stub."""
    ran = [r for r in runs.rows if r.record.status == "ok" and not r.record.on_stub]
    short = [r for r in ran if not measures.timed_steps(r.record)]
    if not short:
        return []
    steps = max(len(row.record.steps) for row in short)
    return [
        Finding(
            id="nothing-timed",
            about=labels(short),
            text="no step was timed: measure.warmup_steps, measure.probed_steps and measure.traced_steps "
            f"use up all {steps}",
            values={"steps": steps},
        )
    ]
