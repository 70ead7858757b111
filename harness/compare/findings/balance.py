"""Ranks that hold the others up, and steps that wait for data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from harness.compare import measures, speed
from harness.compare.findings.finding import Finding, Kind, subject
from harness.compare.rows import Row
from harness.record import RankPart, Record

LEAST_STEPS = 5
"""Fewer do not tell a slow rank from a disturbance."""
PERSISTENT_SHARE = 0.8
"""A rank is persistently slower if it is the slowest in so many of the steps."""
LEAST_SHARE_OF_STEP = 0.05
"""Less than so much of the step is not worth telling."""
SLOWER = 1.25
"""And its median is so many times that of the others: cores of one machine differ by less."""
LARGE_DATA_SHARE = 0.2

KINDS = (
    Kind(
        id="slow-rank",
        title="One rank is persistently slower than the others, which wait for it",
        cause="It has more to do (longer samples, a larger shard), a slower or hotter device, fewer or "
        "shared CPU cores, or a slower link.",
        confirm="The values hold each rank's median. Ranks meet in collectives, so whole steps look alike: "
        "what is compared is the time up to the end of the forward pass, fetching, and computing in "
        "traced steps.",
        fix="Look at the rank's host and device (clocks, other processes, `runtime.threads_per_rank`); give "
        "every rank samples of equal length.",
    ),
    Kind(
        id="slow-data",
        title="A large share of the step goes into fetching batches",
        cause="Batches are made or copied while the device waits.",
        confirm="The values hold the share of the median step, on the rank where it is largest.",
        fix="Prepare the data before the run, or measure with samples of the job's real size; on a tiny "
        "model the fixed costs of a batch weigh more.",
    ),
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """At most one finding of each kind per run."""
    return [finding for row in rows for finding in (_slow_rank(row), _slow_data(row)) if finding is not None]


def _slow_rank(row: Row) -> Finding | None:
    for what, series in _series(row.record).items():
        slowest = persistently_slowest(series)
        if slowest is not None and _is_large(row.record, series):
            rank = row.record.ranks[slowest].rank
            medians = {str(r.rank): median(s) for r, s in zip(row.record.ranks, series, strict=True)}
            return Finding(
                id="slow-rank",
                backends=(row.record.backend.label,),
                message=f"{subject(row)}: rank {rank} is persistently slower in {what}; the others wait",
                values={"rank": rank, "what": what, "median_seconds": medians},
            )
    return None


def persistently_slowest(series: Sequence[Sequence[float]]) -> int | None:
    """Index of the rank that is slowest in most steps and by its median; None: there is none.

    series: seconds per rank and step.
    """
    if len(series) < 2 or len(series[0]) < LEAST_STEPS:
        return None
    slowest = [of_step.index(max(of_step)) for of_step in zip(*series, strict=True)]
    rank = max(set(slowest), key=slowest.count)
    others = median(median(s) for index, s in enumerate(series) if index != rank)
    persistent = slowest.count(rank) >= PERSISTENT_SHARE * len(slowest)
    return rank if persistent and median(series[rank]) > SLOWER * others else None


def _is_large(record: Record, series: Sequence[Sequence[float]]) -> bool:
    """Whether the difference of the ranks matters beside the whole step."""
    medians = [median(of_rank) for of_rank in series]
    step = measures.median_step_seconds(record)
    return step is not None and max(medians) - min(medians) > LEAST_SHARE_OF_STEP * step


def _series(record: Record) -> dict[str, list[list[float]]]:
    """Seconds per rank and step of what does not contain waiting for a slower rank."""
    indices, steps = speed.timed_indices(record), len(record.steps)
    found = {"whole steps": _per_rank(record, indices, lambda rank, index: rank.step_seconds[index])}
    if record.ranks and all("forward" in rank.phase_seconds for rank in record.ranks):
        # Ranks end a step together and may begin it apart. One that begins early waits in the forward
        # pass for the others, so all are counted from where the first began.
        longest = [max(rank.step_seconds[index] for rank in record.ranks) for index in range(steps)]
        found["fetching and forward pass"] = _per_rank(
            record,
            indices,
            lambda rank, index: (
                longest[index]
                - rank.step_seconds[index]
                + rank.data_seconds[index]
                + rank.phase_seconds["forward"][index]
            ),
        )
    traced = [[part.compute_seconds for part in rank.overlap] for rank in record.ranks]
    if traced and len({len(parts) for parts in traced}) == 1:
        found["computing (traced steps)"] = traced
    return found


def _per_rank(
    record: Record, indices: Sequence[int], value: Callable[[RankPart, int], float]
) -> list[list[float]]:
    return [[value(rank, index) for index in indices] for rank in record.ranks]


def _slow_data(row: Row) -> Finding | None:
    share = speed.data_share(row.record)
    if share is None or share <= LARGE_DATA_SHARE:
        return None
    return Finding(
        id="slow-data",
        backends=(row.record.backend.label,),
        message=f"{subject(row)}: {share:.0%} of the step goes into fetching batches",
        values={"data_share": share, "data_seconds": speed.data_seconds(row.record)},
    )
