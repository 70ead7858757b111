"""The seconds of the timed steps of one record as arrays, and what else used its machine meanwhile.

A finding about time names a property of a backend, a rank or a machine. What other programs and a hypervisor
took from one run is none, so it is subtracted first, and what is left must persist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from harness.judge.quantities import measures
from harness.record import ProcessorPart, Record

PERSISTENT_RUNS = 3
"""What so many runs show, and all there are, is no chance of one of them."""
BEYOND_UNSEEN = 2.0
"""Fewer runs must show more than what nobody counts: a neighbour on the other hardware thread of a core,
caches, clock rates. Sharing a core's hardware threads at most halves the speed."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Processor time that went to others than the ranks, from the first timed step to the end of training."""

    seconds: float
    """The stretch that was watched."""
    other_cores: float
    """Processors that anything but the ranks used, on the machine where most were."""
    lost_seconds: float
    """By which it may have made the timed steps longer."""
    lost_by_rank: Sequence[float]
    """By which it may have made each rank slower, ranks in the order of the record."""
    lost_share: float
    """Of the stretch, what was taken at the least: from the rank that lost most, nothing counted twice."""


def disturbance(record: Record) -> Disturbance | None:
    """What the ranks' accounts say; None where a rank has none, and on a CUDA stub: nothing is timed."""
    if record.on_stub:
        return None
    accounts = [rank.processors for rank in record.ranks]
    known = [account for account in accounts if account is not None]
    if not known or len(known) < len(accounts):
        return None
    machines = _by_machine(known)
    taken = {boot: _taken_by_others(parts) for boot, parts in machines.items()}
    # Ranks also wait for each other where they share cores: only what others took is no property of the run.
    lost = [min(_held_up_seconds(part), taken[part.boot]) for part in known]
    return Disturbance(
        seconds=max(part.seconds for part in known),
        other_cores=max(taken[part.boot] / part.seconds for part in known),
        lost_seconds=sum(
            min(sum(map(_held_up_seconds, parts)), taken[boot]) for boot, parts in machines.items()
        ),
        lost_by_rank=lost,
        lost_share=max(
            _lost_seconds(part, parts) / part.seconds / record.world.threads_per_rank
            for parts in machines.values()
            for part in parts
        ),
    )


def is_beyond_noise(factors: Sequence[float]) -> bool:
    """Whether runs that all show the same thing, by these factors, show more than noise of their machine."""
    return bool(factors) and (len(factors) >= PERSISTENT_RUNS or min(factors) > BEYOND_UNSEEN)


def _held_up_seconds(part: ProcessorPart) -> float:
    """At the most: any of what the hypervisor took may have been this rank's."""
    return part.waiting_seconds + part.machine_stolen_seconds


def _lost_seconds(part: ProcessorPart, parts: Sequence[ProcessorPart]) -> float:
    """By one rank's threads: their waiting for other programs, and their share of what was stolen."""
    busy = sum(part.machine_busy_seconds for part in parts) / len(parts)
    stolen = sum(part.machine_stolen_seconds for part in parts) / len(parts)
    ranks = sum(part.process_seconds for part in parts)
    share = part.process_seconds / max(busy, ranks) if ranks else 0.0
    return min(part.waiting_seconds, max(0.0, busy - ranks)) + stolen * share


def _taken_by_others(parts: Sequence[ProcessorPart]) -> float:
    """Processor seconds of one machine that did not go to these ranks."""
    used = sum(part.machine_busy_seconds + part.machine_stolen_seconds for part in parts) / len(parts)
    return max(0.0, used - sum(part.process_seconds for part in parts))


def _by_machine(accounts: Sequence[ProcessorPart]) -> dict[str | None, list[ProcessorPart]]:
    """Ranks of one machine together, whatever containers they run in."""
    found: dict[str | None, list[ProcessorPart]] = {}
    for account in accounts:
        found.setdefault(account.boot, []).append(account)
    return found


PHASES = ("forward", "backward", "step")
WAITING = "waiting"
"""For other stages of a pipeline: in none of the phases."""
Seconds: TypeAlias = npt.NDArray[np.float64]
"""A line per rank and a column per timed step."""


WHOLE = "whole step"
DATA = "data"


@dataclass(frozen=True, kw_only=True)
class Timings:
    """How long each rank took for each timed step and for its parts."""

    seconds: dict[str, Seconds]
    """Of the whole step, of fetching its batches, and of the phases that every rank timed."""
    medians: dict[str, list[float]]
    """The same over the steps, a value per rank."""

    @property
    def steps(self) -> Seconds:
        """The whole step."""
        return self.seconds[WHOLE]

    @property
    def data(self) -> Seconds:
        """Fetching its batches."""
        return self.seconds[DATA]

    @property
    def phases(self) -> Seconds | None:
        """All phases added up, and what a pipeline waits between them, without fetching; None where one was
        not timed."""
        if any(phase not in self.seconds for phase in PHASES):
            return None
        parts = [self.seconds[part] for part in (*PHASES, WAITING) if part in self.seconds]
        return sum(parts, np.zeros_like(self.steps))


def timings(record: Record) -> Timings | None:
    """None without ranks or timed steps."""
    ranks = record.ranks
    phases = [phase for phase in (*PHASES, WAITING) if all(phase in rank.phase_seconds for rank in ranks)]
    lists = {WHOLE: [rank.step_seconds for rank in ranks], DATA: [rank.data_seconds for rank in ranks]}
    lists |= {phase: [rank.phase_seconds[phase] for rank in ranks] for phase in phases}
    first = measures.first_timed(record)
    # A rank that died left shorter lists than the others, or than there are steps.
    lengths = [len(of_rank) for of_ranks in lists.values() for of_rank in of_ranks]
    last = min(len(record.steps), *lengths) if ranks else 0
    if first >= last:
        return None
    seconds = np.array([[of_rank[first:last] for of_rank in of_ranks] for of_ranks in lists.values()])
    return Timings(
        seconds=dict(zip(lists, seconds, strict=True)),
        medians=dict(zip(lists, np.median(seconds, axis=2).tolist(), strict=True)),
    )
