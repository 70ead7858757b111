"""Ranks that slow down the others, and steps that wait for data."""

from __future__ import annotations

import numpy as np

from harness.compare import speed
from harness.compare.findings.finding import Finding, Kind, of_cells
from harness.compare.rows import Row
from harness.compare.run import Run
from harness.compare.runs import Runs
from harness.compare.timings import DATA, Seconds

LEAST_STEPS = 5
"""With fewer a slow rank cannot be distinguished from a disturbance."""
PERSISTENT_SHARE = 0.8
"""A rank is persistently slower if it is the slowest in at least this share of the steps."""
LEAST_SHARE_OF_STEP = 0.05
"""A smaller share of the step is not reported."""
SLOWER = 1.25
"""Its median must also be this many times that of the others: cores of one machine differ by less."""
LARGE_DATA_SHARE = 0.2

KINDS = (
    Kind(
        id="slow-rank",
        title="One rank is persistently slower and makes the others wait",
        cause="The rank has more work (longer samples, a larger shard), a slower or hotter device, fewer or "
        "shared CPU cores, or a slower link.",
        confirm="The values hold each rank's median. Collectives synchronise the ranks, so step times look "
        "alike: the comparison uses the time up to the end of the forward pass, data loading, and computing "
        "in traced steps.",
        fix="Check the rank's host and device (clocks, other processes, `runtime.threads_per_rank`); give "
        "every rank samples of equal length.",
    ),
    Kind(
        id="slow-data",
        title="Fetching batches takes a large share of the step",
        cause="Batches are made or copied while the device waits.",
        confirm="The values hold the share of the median step on the rank with the largest share.",
        fix="Prepare the data before the run, or measure with samples of realistic size; with a tiny "
        "model the fixed cost of a batch weighs more.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """At most one finding of each kind per run."""
    slow_data = [finding for row in runs.rows if (finding := _slow_data(row)) is not None]
    return [*of_cells(runs, _slow_rank), *slow_data]


def _slow_rank(row: Row) -> Finding | None:
    for what, series in _series(row.run).items():
        slowest = persistently_slowest(series)
        if slowest is not None and _is_large(row.run, series):
            rank = row.record.ranks[slowest].rank
            middle = np.median(series, axis=1).tolist()
            medians = {str(r.rank): m for r, m in zip(row.record.ranks, middle, strict=True)}
            return Finding(
                id="slow-rank",
                about=row.cell,
                text=f"rank {rank} is persistently slower in {what} and makes the others wait",
                values={"rank": rank, "what": what, "median_seconds": medians},
            )
    return None


def persistently_slowest(series: Seconds) -> int | None:
    """Index of the rank that is slowest in most steps and by its median; None: there is none."""
    if series.shape[0] < 2 or series.shape[1] < LEAST_STEPS:
        return None
    counts = np.bincount(series.argmax(axis=0))
    rank = int(counts.argmax())
    if counts[rank] < PERSISTENT_SHARE * series.shape[1]:
        return None
    medians = np.median(series, axis=1)
    return rank if medians[rank] > SLOWER * np.median(np.delete(medians, rank)) else None


def _is_large(run: Run, series: Seconds) -> bool:
    """Whether the difference between the ranks matters in a step."""
    medians = np.median(series, axis=1)
    step = run.median_step_seconds
    return step is not None and bool(medians.max() - medians.min() > LEAST_SHARE_OF_STEP * step)


def _series(run: Run) -> dict[str, Seconds]:
    """Series of seconds that contain no waiting for a slower rank, by name."""
    timed = run.timings
    if timed is None:
        return {}
    found = {"whole steps": timed.steps}
    if "forward" in timed.seconds:
        # Ranks end a step at the same time but may begin it at different ones. A rank that begins early
        # waits in the forward pass for the others, so all are measured from the earliest begin.
        start = timed.steps.max(axis=0) - timed.steps
        found["fetching and forward pass"] = start + timed.data + timed.seconds["forward"]
    traced = [[part.compute_seconds for part in rank.overlap] for rank in run.record.ranks]
    if len({len(parts) for parts in traced}) == 1 and traced[0]:
        found["computing (traced steps)"] = np.array(traced)
    return found


def _slow_data(row: Row) -> Finding | None:
    share = speed.data_share(row.run)
    if share is None or share <= LARGE_DATA_SHARE:
        return None
    return Finding(
        id="slow-data",
        about=row.cell,
        text=f"fetching batches takes {share:.0%} of the step",
        values={"data_share": share, "data_seconds": row.run.largest_median(DATA)},
    )
