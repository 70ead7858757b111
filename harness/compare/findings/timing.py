"""Speed that was not measured, or not as it should be."""

from __future__ import annotations

from harness.compare import measures
from harness.compare.findings.finding import Finding, Kind, labels
from harness.compare.runs import Runs

KINDS = (
    Kind(
        id="nothing-timed",
        title="A run was too short for a step to be timed",
        cause="`measure.warmup_steps`, `measure.counted_steps` and `measure.traced_steps` take all its "
        "steps.",
        confirm="Its tokens/s and step time are n/a.",
        fix="Raise `training.steps`, or lower the three settings.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """Runs that ended well but were too short for a step to be timed, in one finding."""
    short = [r for r in runs.rows if r.record.status == "ok" and not measures.timed_steps(r.record)]
    if not short:
        return []
    steps = max(len(row.record.steps) for row in short)
    return [
        Finding(
            id="nothing-timed",
            about=labels(short),
            text=f"{steps} steps leave none to time after those of measure.warmup_steps, "
            "measure.counted_steps and measure.traced_steps: speed is n/a",
            values={"steps": steps},
        )
    ]
