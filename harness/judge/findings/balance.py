"""Ranks that slow down the others, or that train fewer modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from harness.judge.agreement.causes import where
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.quantities import (
    PERSISTENT_RUNS,
    Run,
    Seconds,
    gradient_lost,
    idle_on_some_ranks,
    is_beyond_noise,
)
from harness.judge.rows import CellRuns, JudgedRun, Place, Runs
from harness.judge.wording import numbered

LEAST_STEPS = 5
"""With fewer a slow rank cannot be distinguished from a disturbance."""
PERSISTENT_SHARE = 0.8
"""A rank is persistently slower if it is the slowest in at least this share of the steps."""
LEAST_SHARE_OF_STEP = 0.05
"""A smaller share of the step is not reported."""
LEAST_TRACED_STEPS = 3
"""Of all runs of a cell. One step may wait for a disk, so two must show it, and a third of many."""
LEAST_ASLEEP_SECONDS = 1e-3
"""More than on any other rank; what sound runs show is in docs/decisions.md."""
SLOWER = 1.25
"""Its median must also be this many times that of the others: cores of one machine differ by less."""
ASLEEP = "time asleep (traced steps)"


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """How much slower a rank of one run is than the others, without what the machine took from it."""

    rank: int
    what: str
    """The part of the step that is compared."""
    factor: float
    """Median of the rank over that of the others."""
    medians: dict[str, float]
    """Seconds by rank, as measured."""


def find_slow_ranks(runs: Runs) -> list[Finding]:
    """One finding per run of a cell of which a rank is slow in all runs."""
    slow = {run: slow_ranks(run) for group in runs.groups for run in group.runs if run.timings is not None}
    places: dict[Place, list[Run]] = {}
    for group in runs.groups:
        places.setdefault(group.place, []).extend(run for run in group.runs if run in slow)
    found = []
    for group in runs.groups:
        own = [run for run in group.runs if run in slow]
        shown = _persistent([slow[run] for run in own], [slow[run] for run in places[group.place]])
        found += [_finding(group, one) for one in shown] or _asleep(group)
    return [*found, *of_cells(runs, _idle), *of_cells(runs, _lost)]


def _idle(row: JudgedRun) -> Finding | None:
    """Where the run left its reference: a mean over ranks to which one adds nothing may be right."""
    found = idle_on_some_ranks(row.record)
    if not found or row.judgement.parity != "diverged":
        return None
    first, *later = found
    more = sum(len(one.names) for one in later)
    return Finding(
        id="idle-on-some-ranks",
        about=row.cell,
        text=f"no gradient reaches {where(row.record, first.names)} on {numbered('rank', first.ranks)} in "
        f"step {first.step}, while others have one" + (f"; the same holds for {more} more" if more else ""),
        values={"missing": [asdict(one) for one in found]},
    )


def _lost(row: JudgedRun) -> Finding | None:
    found = gradient_lost(row.reference.record, row.record) if row.reference is not None else None
    if found is None:
        return None
    return Finding(
        id="gradient-lost",
        about=row.cell,
        text=f"no gradient reaches {where(row.record, found.names)} on any rank from step {found.step} on; "
        "before, and in the reference, one does",
        values={"step": found.step, "parameters": found.names},
    )


def _persistent(of_cell: Sequence[list[SlowRank]], of_place: Sequence[list[SlowRank]]) -> list[SlowRank]:
    """Of each run of a cell how slow the rank is that is slow in all of them; none if there is none."""
    for first in of_cell[0] if of_cell else []:
        if len(own := _same(first, of_cell)) < len(of_cell):
            continue
        everywhere = len(of_place) >= PERSISTENT_RUNS and len(_same(first, of_place)) == len(of_place)
        if everywhere or is_beyond_noise([slow.factor for slow in own]):
            return own
    return []


def _same(first: SlowRank, runs: Sequence[list[SlowRank]]) -> list[SlowRank]:
    """The same rank in the same part of the step, of those runs in which it is slow."""
    return [slow for of_run in runs for slow in of_run if (slow.rank, slow.what) == (first.rank, first.what)]


def _finding(group: CellRuns, slow: SlowRank) -> Finding:
    return Finding(
        id="slow-rank",
        about=group.cell,
        text=f"rank {slow.rank} is persistently slower in {slow.what} and makes the others wait",
        values={"rank": slow.rank, "what": slow.what, "median_seconds": slow.medians},
    )


def _asleep(group: CellRuns) -> list[Finding]:
    """The rank that lies idle in traced steps, outside of communication and whatever the machine took.

    What is recorded of a step is the least, and of sound ranks next to nothing, unless the machine stops for
    a moment: that touches other ranks in the same step, so only a step counts in which no other sleeps half
    as long.
    Of several threads the first waits for the others, which the machine may hold up.
    """
    world = group.record.world
    ranks = [rank.rank for rank in group.record.ranks]
    if len(ranks) < 2 or world.mesh.size("pipeline") > 1 or world.threads_per_rank > 1:
        return []
    steps = [
        [part.asleep_seconds for part in of_step]
        for run in group.runs
        for of_step in zip(*(rank.overlap for rank in run.record.ranks), strict=False)
        if len(of_step) == len(ranks)
    ]
    known = np.array([of_step for of_step in steps if None not in of_step], dtype=float)
    if len(known) < LEAST_TRACED_STEPS:
        return []
    others = np.array([np.delete(known, place, axis=1).max(axis=1) for place in range(len(ranks))])
    longer = np.where(others > np.maximum(LEAST_ASLEEP_SECONDS, known.T / 2), 0.0, known.T - others)
    # So long or longer in a third of the steps.
    often = dict(zip(ranks, np.sort(longer)[:, -max(2, math.ceil(len(known) / 3))].tolist(), strict=True))
    slowest = max(often, key=often.__getitem__)
    if often[slowest] <= LEAST_ASLEEP_SECONDS:
        return []
    return [
        Finding(
            id="slow-rank",
            about=group.cell,
            text=f"rank {slowest} is idle for {1e3 * often[slowest]:.2g} ms of a step, outside of "
            "communication, and makes the others wait",
            values={"rank": slowest, "what": ASLEEP, "seconds": {str(r): of for r, of in often.items()}},
        )
    ]


def slow_ranks(run: Run) -> list[SlowRank]:
    """The slow rank in each part of the step that has one; none where the machine's share is not known."""
    found = []
    for what, series in _series(run).items():
        slowest = persistently_slowest(series)
        if slowest is None or run.disturbance is None or run.median_step_seconds is None:
            continue
        lost = run.disturbance.lost_by_rank[slowest] / len(run.step_seconds)
        medians = np.median(series, axis=1)
        others = float(np.median(np.delete(medians, slowest)))
        own = float(medians[slowest]) - lost
        if own > SLOWER * others and own - others > LEAST_SHARE_OF_STEP * run.median_step_seconds:
            ranks = [rank.rank for rank in run.record.ranks]
            found.append(
                SlowRank(
                    rank=ranks[slowest],
                    what=what,
                    factor=own / others if others else math.inf,
                    medians=dict(zip(map(str, ranks), medians.tolist(), strict=True)),
                )
            )
    return found


def persistently_slowest(series: Seconds) -> int | None:
    """Index of the rank that is slowest in most steps; None: there is none."""
    if series.shape[0] < 2 or series.shape[1] < LEAST_STEPS:
        return None
    counts = np.bincount(series.argmax(axis=0))
    rank = int(counts.argmax())
    return rank if counts[rank] >= PERSISTENT_SHARE * series.shape[1] else None


def _series(run: Run) -> dict[str, Seconds]:
    """Series of seconds that contain no waiting for a slower rank, by name."""
    timed = run.timings
    if timed is None:
        return {}
    found = {"whole steps": timed.steps}
    if run.record.world.mesh.size("pipeline") > 1:
        return found  # stages differ in what they compute
    if "forward" in timed.seconds:
        # Ranks end a step at the same time but may begin it at different ones. A rank that begins early
        # waits in the forward pass for the others, so all are measured from the earliest begin.
        start = timed.steps.max(axis=0) - timed.steps
        found["fetching and forward pass"] = start + timed.data + timed.seconds["forward"]
    traced = [[part.compute_seconds for part in rank.overlap] for rank in run.record.ranks]
    if len({len(parts) for parts in traced}) == 1 and traced[0]:
        found["computing (traced steps)"] = np.array(traced)
    return found
