"""Impossible speed: faster than the device, shorter than its phases, or with work outside of its clock."""

from __future__ import annotations

import numpy as np

from harness.judge import measures, speed
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import OUTSIDE

MEASURED_MARGIN = 1.25
"""A measured peak holds for one second; at another clock and load the machine may be faster."""
CLOCK_SHARE = 0.01
CLOCK_SECONDS = 1e-4
"""The clocks of host and device may differ by so much of a step, and by so much at its borders."""


def find(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run."""
    found = []
    for row in runs.rows:
        found += _beyond_peak(row)
        found += _shorter_than_parts(row)
        found += _outside_clock(row)
    return found


def _outside_clock(row: Row) -> list[Finding]:
    """Updates that were made after the time of their step was taken."""
    made = row.record.observed.updates_by_phase if row.record.observed is not None else {}
    late = made.get(OUTSIDE, 0) + made.get("forward", 0)
    if not late:
        return []
    where = "between two steps, where no clock runs" if made.get(OUTSIDE) else "in the next forward pass"
    return [
        Finding(
            id="work-outside-clock",
            about=row.cell,
            text=f"updates of the optimizer ran {where} ({late} of {sum(made.values())} that were looked "
            "at): a step's time lacks its update",
            values={"updates_by_phase": made},
        )
    ]


def _beyond_peak(row: Row) -> list[Finding]:
    record = row.record
    for peak, margin in ((speed.sheet_peak(record), 1.0), (speed.measured_peak(record), MEASURED_MARGIN)):
        achieved = speed.least_flops_per_second(row.run) if peak is not None else None
        if peak is not None and achieved is not None and achieved > margin * peak.flops_per_second:
            return [
                Finding(
                    id="faster-than-possible",
                    about=row.cell,
                    text=f"needs {achieved / 1e12:.3g} TFLOP/s but the devices reach "
                    f"{peak.flops_per_second / 1e12:.3g} ({peak.source}): timing is not synchronised",
                    values={
                        "least_flops_per_second": achieved,
                        "peak_flops_per_second": peak.flops_per_second,
                        "peak_source": peak.source,
                    },
                )
            ]
    return []


def _shorter_than_parts(row: Row) -> list[Finding]:
    """The timed step that is shortest compared with its phases."""
    record, timed = row.record, row.run.timings
    if timed is None or timed.phases is None:
        return []
    # On CUDA the host fetches the next batch while the device still works on the last.
    parts = timed.phases + timed.data if record.world.device == "cpu" else timed.phases
    missing = parts - timed.steps * (1 + CLOCK_SHARE) - CLOCK_SECONDS
    rank, step = np.unravel_index(missing.argmax(), missing.shape)
    if missing[rank, step] <= 0:
        return []
    values = {
        "rank": record.ranks[rank].rank,
        "step": record.steps[measures.first_timed(record) + int(step)].step,
        "step_seconds": float(timed.steps[rank, step]),
        "phase_seconds": float(parts[rank, step]),
    }
    return [
        Finding(
            id="inconsistent-timing",
            about=row.cell,
            text=f"step {values['step']:g} of rank {values['rank']:g} took "
            f"{values['step_seconds']:.4g} s, its phases {values['phase_seconds']:.4g} s: the step's timer "
            "stopped too early",
            values=values,
        )
    ]
