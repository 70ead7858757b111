"""Pipelines: the bubble that the schedule predicts and that was measured, and what each stage did."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.pipeline import PipelineUse, pipeline_use
from harness.judge.repeats import Repeats
from harness.judge.statistics import median_known
from harness.tell.document import Column, Paragraph, Section, Table
from harness.tell.formats import megabytes, milliseconds, percent
from harness.tell.tables import LABELS

COLUMNS = (
    *LABELS,
    Column("schedule", "schedule", align="left"),
    Column("stages", "stages"),
    Column("pipelines", "pipelines"),
    Column("micro_batches", "micro-batches"),
    Column("expected_bubble", "bubble predicted", percent),
    Column("measured_bubble", "measured", percent),
)
STAGE_COLUMNS = (
    *LABELS,
    Column("rank", "rank"),
    Column("stages", "its stages", align="left"),
    Column("blocks", "blocks"),
    Column("model_state_bytes", "states MB", megabytes),
    Column("forward_seconds", "forward ms", milliseconds, optional=True),
    Column("backward_seconds", "backward ms", milliseconds, optional=True),
    Column("waiting_seconds", "waiting ms", milliseconds, optional=True),
    Column("activation_bytes", "activations sent MB", megabytes),
    Column("gradient_bytes", "gradients sent MB", megabytes),
)
TEXT = (
    "The bubble is the share of the forward and backward passes in which a rank waits. Predicted from the "
    "schedule: (p - 1) / (v m + p - 1) for p ranks of v stages and m micro-batches, as if all stages took "
    "equally long and messages no time. Measured: time outside of a rank's own passes until the last rank of "
    "its pipeline has ended its own, mean over ranks and median over the timed steps; uneven stages, "
    "messages and busy processors add to it. Waiting: until the rank's own last pass; that it then waits for "
    "others counts in its update. Sent: per step, to the next stage (activations) and the one before (their "
    "gradients, and that of a tied embedding)."
)


def pipeline_section(comparison: Comparison) -> Section | None:
    """None where no run is a pipeline."""
    found = [(group, uses) for group in comparison.groups if (uses := _uses(group))]
    if not found:
        return None
    summary = [
        [
            *group.cell,
            uses[0].schedule,
            uses[0].stages,
            group.cell.world_size // uses[0].ranks,
            uses[0].micro_batches,
            uses[0].expected_bubble,
            median_known([use.measured_bubble for use in uses]),
        ]
        for group, uses in found
    ]
    stages = [
        [
            *group.cell,
            stage.rank,
            ", ".join(map(str, stage.stages)),
            stage.blocks,
            stage.model_state_bytes,
            stage.forward_seconds,
            stage.backward_seconds,
            stage.waiting_seconds,
            stage.activation_bytes,
            stage.gradient_bytes,
        ]
        for group, uses in found
        for stage in uses[0].by_rank
    ]
    return Section(
        "pipeline",
        "Pipelines",
        [
            Table(key="pipelines", columns=list(COLUMNS), rows=summary),
            Table(key="pipeline_stages", columns=list(STAGE_COLUMNS), rows=stages),
            Paragraph(TEXT),
        ],
    )


def _uses(group: Repeats) -> list[PipelineUse]:
    return [use for row in group.rows if (use := pipeline_use(row.record)) is not None]
