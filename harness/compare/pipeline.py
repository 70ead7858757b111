"""What the ranks of a pipeline did: their stages, how long they computed and waited, what they sent."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from harness.backends.pipeline.cut import Cut
from harness.compare.measures import first_timed
from harness.compare.states import rank_states
from harness.compare.timings import WAITING
from harness.record import RankPart, Record
from harness.record.workload import of_record
from harness.theory import pipeline

PASSES = ("forward", "backward")
MESSAGE = "send"


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """One rank of a pipeline."""

    rank: int
    stages: tuple[int, ...]
    blocks: int
    model_state_bytes: int | None
    forward_seconds: float | None
    """Median over the timed steps, as all seconds here; None: not timed."""
    backward_seconds: float | None
    waiting_seconds: float | None
    """For other stages, and for messages."""
    activation_bytes: float
    """Sent to the next stages per probed step."""
    gradient_bytes: float
    """Sent to the stages before per probed step."""

    @property
    def waiting_share(self) -> float | None:
        """Of the passes."""
        parts = (self.forward_seconds, self.backward_seconds, self.waiting_seconds)
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or not sum(known):
            return None
        return known[-1] / sum(known)


@dataclass(frozen=True, kw_only=True)
class PipelineUse:
    """One run of a pipeline."""

    schedule: str
    ranks: int
    """Of one pipeline."""
    stages: int
    micro_batches: int
    """Per micro-step."""
    expected_bubble: float
    """Share of the passes that ranks wait by the schedule alone."""
    by_rank: tuple[StageUse, ...]

    @property
    def measured_bubble(self) -> float | None:
        """Share of the passes that ranks waited, mean over them; None: not timed."""
        shares = [use.waiting_share for use in self.by_rank]
        known = [share for share in shares if share is not None]
        return fmean(known) if known and len(known) == len(shares) else None


def pipeline_use(record: Record) -> PipelineUse | None:
    """None for a run that is no pipeline, or whose ranks measured nothing."""
    workload = of_record(record)
    if workload is None or record.world.mesh.size("pipeline") == 1 or not record.ranks:
        return None
    if workload.strategy.family != "pipeline":
        return None
    cut, micro_batches = pipeline.cut_of(workload), pipeline.micro_batches_of(workload)
    return PipelineUse(
        schedule=pipeline.options_of(workload).schedule,
        ranks=cut.ranks,
        stages=cut.stages,
        micro_batches=micro_batches,
        expected_bubble=pipeline.bubble_of(workload),
        by_rank=tuple(_stage_use(record, part, cut) for part in record.ranks),
    )


def _stage_use(record: Record, part: RankPart, cut: Cut) -> StageUse:
    stages = cut.of_rank(record.world.mesh.coordinates(part.rank)["pipeline"])
    held = {states.rank: states.measured_bytes for states in rank_states(record)}
    first = first_timed(record)
    seconds = {
        phase: median(series[first:]) if (series := part.phase_seconds.get(phase, []))[first:] else None
        for phase in (*PASSES, WAITING)
    }
    return StageUse(
        rank=part.rank,
        stages=stages,
        blocks=sum(len(cut.blocks_of(stage)) for stage in stages),
        model_state_bytes=held.get(part.rank),
        forward_seconds=seconds["forward"],
        backward_seconds=seconds["backward"],
        waiting_seconds=seconds[WAITING],
        activation_bytes=_sent(record, part.rank, "forward"),
        gradient_bytes=_sent(record, part.rank, "backward"),
    )


def _sent(record: Record, rank: int, phase: str) -> float:
    """Bytes per probed step."""
    rows = (row for row in record.comm if (row.rank, row.phase, row.op) == (rank, phase, MESSAGE))
    steps = record.windows.probed if record.windows else 0
    return sum(row.payload_bytes for row in rows) / max(1, steps)
