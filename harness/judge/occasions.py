"""Occasions: runs made in one go on one machine, and how far runs spread within and between them.

Runs of one occasion share what changes between days: neighbours on the host, temperature, caches, drivers.
An interval of runs of one occasion holds none of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from statistics import median
from typing import TypeAlias

from harness.record import Record

PAUSE_SECONDS = 3600.0
"""A longer time in which no run of the comparison trains begins a new occasion."""
LEAST_CELLS_OF_HOST = 2
"""A host that ran fewer cells has nothing to compare on it, so its runs are no occasion of their own."""

ByOccasion: TypeAlias = Mapping[int, Sequence[float]]
"""Figures of the runs of one cell by the number of their occasion."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the runs of one cell lie apart, relative to their median; None: too few to say."""

    occasions: int
    within: float | None
    """Largest less smallest run of the occasion where that is most; None: one run on each."""
    between: float | None
    """Largest less smallest median of an occasion; None: one occasion."""


def occasions(records: Sequence[Record]) -> list[int]:
    """The number of each record's occasion, counted from 0 in order of time.

    Runs after a pause belong to another occasion, and so do runs on another host, if no scheduler
    chose it and each host ran several cells. Records whose time cannot be read belong to the first.
    """
    began = [began_at(record) for record in records]
    dated = sorted((start, index) for index, start in enumerate(began) if start is not None)
    stretches = [[index for index, start in enumerate(began) if start is None]]
    ended: float | None = None
    for start, index in dated:
        if ended is not None and start - ended > PAUSE_SECONDS:
            stretches.append([])
        stretches[-1].append(index)
        ended = max(start + _least_seconds(records[index]), ended if ended is not None else start)
    numbers = [0] * len(records)
    for number, members in enumerate(part for stretch in stretches for part in _by_host(records, stretch)):
        for index in members:
            numbers[index] = number
    return numbers


def spread(values: ByOccasion) -> Spread:
    """Spread of the runs of one cell within and between its occasions; `values` are positive."""
    known = [list(of_occasion) for of_occasion in values.values() if of_occasion]
    if not known:
        return Spread(occasions=0, within=None, between=None)
    middle = median([value for of_occasion in known for value in of_occasion])
    repeated = [max(of) - min(of) for of in known if len(of) > 1]
    medians = [median(of) for of in known]
    return Spread(
        occasions=len(known),
        within=max(repeated) / middle if repeated and middle else None,
        between=(max(medians) - min(medians)) / middle if len(known) > 1 and middle else None,
    )


def began_at(record: Record) -> float | None:
    """Seconds since 1970 at which the run began or, where that is not known, was asked for."""
    try:
        began = datetime.fromisoformat(record.environment.started_at or record.created_at)
    except ValueError:
        return None
    return (began if began.tzinfo is not None else began.replace(tzinfo=UTC)).timestamp()


def _least_seconds(record: Record) -> float:
    """How long the run lasted at the least: set-up, steps and evaluations, and what it waited for turns."""
    setup = max((rank.setup_seconds for rank in record.ranks), default=0.0)
    evaluations = sum(part.seconds or 0.0 for part in record.eval)
    seconds = setup + sum(step.seconds for step in record.steps) + evaluations
    seconds += record.turns.waited_seconds if record.turns else 0.0
    return seconds if isfinite(seconds) else 0.0


def _by_host(records: Sequence[Record], stretch: Sequence[int]) -> list[Sequence[int]]:
    """The runs of each host, the whole stretch where hosts say nothing."""
    found: dict[Hashable, list[int]] = {}
    for index in stretch:
        found.setdefault(tuple(sorted({rank.host for rank in records[index].ranks})), []).append(index)
    # A run that never started names no host: it stays with the first.
    lost = found.pop((), [])
    chosen = any(records[index].environment.slurm is not None for index in stretch)
    cells = [{(records[i].backend.label, records[i].world.world_size) for i in of} for of in found.values()]
    if chosen or len(found) < 2 or min(map(len, cells)) < LEAST_CELLS_OF_HOST:
        return [stretch]
    first, *others = found.values()
    return [[*lost, *first], *others]
