"""Pipelines: the bubble that the schedule predicts and that was measured, and what each stage did."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.quantities.pipeline import PipelineUse, pipeline_use
from harness.judge.repeats import CellRuns
from harness.judge.statistics import median_known
from harness.tell.document import Paragraph, Section, Table
from harness.tell.tables import prose, row_of, table_columns

STAGES = table_columns("pipeline_stage")


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
            *row_of(STAGES[4:], stage),
        ]
        for group, uses in found
        for stage in uses[0].by_rank
    ]
    return Section(
        "pipeline",
        "Pipelines",
        [
            Table(key="pipelines", columns=table_columns("pipeline"), rows=summary),
            Table(key="pipeline_stages", columns=STAGES, rows=stages),
            Paragraph(prose("pipeline")),
        ],
    )


def _uses(group: CellRuns) -> list[PipelineUse]:
    return [use for row in group.rows if (use := pipeline_use(row.record)) is not None]
