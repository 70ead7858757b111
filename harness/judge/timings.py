"""The seconds of the timed steps of one record as arrays, and their medians by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from harness.judge import measures
from harness.record import Record

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
