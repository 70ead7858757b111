"""Steps that wait for data."""

from __future__ import annotations

from statistics import median

from harness.judge.findings.finding import Finding
from harness.judge.repeats import Repeats, Runs
from harness.judge.run import Run
from harness.judge.timings import DATA, WHOLE

LARGE_SHARE = 0.2


def find(runs: Runs) -> list[Finding]:
    """One finding per cell that fetches slowly in all its runs."""
    return [finding for group in runs.groups if (finding := _judge(group)) is not None]


def _judge(group: Repeats) -> Finding | None:
    shares = [share for run in group.runs if (share := data_share(run)) is not None]
    if not shares or min(shares) <= LARGE_SHARE:
        return None
    return Finding(
        id="slow-data",
        about=group.cell,
        text=f"fetching batches takes {median(shares):.0%} of the step",
        values={
            "data_share": median(shares),
            "data_seconds": median([run.largest_median(DATA) or 0.0 for run in group.runs]),
        },
    )


def data_share(run: Run) -> float | None:
    """Largest over ranks of the share of the median step that goes into fetching; None: nothing was timed."""
    lost = run.disturbance.lost_by_rank if run.disturbance else [0.0] * len(run.record.ranks)
    shares = [
        (fetching - taken / len(run.step_seconds)) / step
        for fetching, step, taken in zip(run.rank_medians(DATA), run.rank_medians(WHOLE), lost, strict=False)
        if step
    ]
    return max(shares, default=None)
