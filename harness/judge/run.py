"""One record as a comparison shows it, with the figures that several parts need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from harness.judge.cell import CellName
from harness.judge.distance import Series, series
from harness.judge.quantities import measures
from harness.judge.quantities.timings import Disturbance, Timings, disturbance, timings
from harness.judge.statistics import steady_from
from harness.record import Record


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A record under its label; equal to itself only.

    Each figure is computed on first use and kept as long as the run, that is as long as its comparison.
    """

    record: Record
    label: str
    """The backend with its options, and in brackets what distinguishes it from others of its job and size."""
    session: int = 0
    """Which session of its comparison it ran on, counted from 0."""

    @classmethod
    def of(cls, record: Record) -> Run:
        """A run that is not compared with others, under the label of its backend."""
        return cls(record=record, label=record.backend.label)

    @property
    def backend(self) -> str:
        """The label without the brackets."""
        return self.record.backend.label

    @property
    def cell(self) -> CellName:
        """The label and the number of ranks."""
        return CellName(self.label, self.record.world.world_size)

    @cached_property
    def series(self) -> tuple[Series, Series]:
        """Losses and gradient norms of all steps."""
        return series(self.record)

    @cached_property
    def step_seconds(self) -> list[float]:
        """Duration of each timed step, the slowest rank's."""
        return measures.step_seconds(self.record)

    @cached_property
    def mean_step_seconds(self) -> float | None:
        """Mean duration of a timed step: the clock of a run, which its rates follow."""
        return fmean(self.step_seconds) if self.step_seconds else None

    @cached_property
    def median_step_seconds(self) -> float | None:
        """Median duration of a timed step."""
        return measures.median_step_seconds(self.record)

    @cached_property
    def tokens_per_second(self) -> float | None:
        """Over the timed steps, all ranks together."""
        return measures.rate(self.record, "tokens")

    @cached_property
    def samples_per_second(self) -> float | None:
        """Over the timed steps, all ranks together."""
        return measures.rate(self.record, "samples")

    @cached_property
    def rank_peaks(self) -> list[int]:
        """Per rank, the largest allocator peak within the probed steps; empty where no step was probed."""
        return measures.peak_bytes(self.record)

    @cached_property
    def steady_from(self) -> int | None:
        """Number of the first steady step; None: too few steps, or there is none."""
        return steady_from(self.record)

    @cached_property
    def timings(self) -> Timings | None:
        """The seconds of each rank; None without ranks or timed steps."""
        return timings(self.record)

    @cached_property
    def disturbance(self) -> Disturbance | None:
        """What else used the processors in the timed steps; None where that was not recorded."""
        return disturbance(self.record)

    @property
    def own_step_seconds(self) -> float | None:
        """The mean timed step without what others took from CPU ranks; None where that was not recorded."""
        lost = self.disturbance.lost_share if self.disturbance and self.record.world.device == "cpu" else 1.0
        mean = self.mean_step_seconds
        return mean * (1 - lost) if mean is not None and lost < 1 else None

    def rank_medians(self, part: str) -> list[float]:
        """Per rank, the median timed step or a part of it; empty where that was not timed."""
        return [] if self.timings is None else self.timings.medians.get(part, [])

    def largest_median(self, part: str) -> float | None:
        """Of the rank on which it is largest; None where that was not timed."""
        return max(self.rank_medians(part), default=None)

    def least_median(self, part: str) -> float | None:
        """Of the rank on which it is smallest; None where that was not timed."""
        return min(self.rank_medians(part), default=None)
