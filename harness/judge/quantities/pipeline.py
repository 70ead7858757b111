"""What the ranks of a pipeline did: their stages, how long they computed and waited, what they sent."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from harness.backends.pipeline.cut import Cut
from harness.forms import pipeline
from harness.judge.quantities.measures import first_timed
from harness.judge.quantities.model_states import rank_states
from harness.judge.quantities.timings import WAITING, Seconds, timings
from harness.record import RankPart, Record
from harness.record.workload import of_record

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
    """For other stages, and for messages, until the rank's own last pass."""
    activation_bytes: float
    """Sent to the next stages per probed step."""
    gradient_bytes: float
    """Sent to the stages before per probed step."""


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
    measured_bubble: float | None
    """Share of the passes that ranks waited, as `idle_share` has it; None: not timed."""
    by_rank: tuple[StageUse, ...]


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
        measured_bubble=_measured_bubble(record),
        by_rank=tuple(_stage_use(record, part, cut) for part in record.ranks),
    )


def _measured_bubble(record: Record) -> float | None:
    """None: not timed."""
    seconds = (found := timings(record)) and found.seconds
    if not seconds or any(phase not in seconds for phase in (*PASSES, WAITING)):
        return None
    computing = seconds[PASSES[0]] + seconds[PASSES[1]]
    places = [record.world.mesh.coordinates(part.rank) for part in record.ranks]
    pipelines = [tuple(at for name, at in place.items() if name != "pipeline") for place in places]
    return idle_share(computing, computing + seconds[WAITING], pipelines)


def idle_share(computing: Seconds, until_last: Seconds, pipelines: Sequence[Hashable]) -> float | None:
    """Share of a pipeline's passes in which its ranks run none, mean over ranks and median over steps.

    computing: seconds of a rank's own passes; until_last: seconds until the last of them ended; pipelines:
    which pipeline a rank belongs to. Ranks begin a step together, as the norm's all-reduce ended the one
    before. The passes last until the slowest rank's have ended: who ends sooner waits for it in the norm's
    all-reduce, which no seconds of waiting show.
    """
    spans = np.empty_like(until_last)
    for name in set(pipelines):
        own = [rank for rank, of in enumerate(pipelines) if of == name]
        spans[own] = until_last[own].max(axis=0)
    if not spans.all():
        return None
    return float(np.median(np.mean(1 - computing / spans, axis=0)))


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
