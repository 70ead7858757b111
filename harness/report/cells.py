"""The cells of a report, by what a reader may filter."""

from __future__ import annotations

from dataclasses import dataclass

from harness.judge.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class ReportCell:
    """A cell; the fields are named as the columns of tables are."""

    job_id: str
    backend: str
    """Label of the runs."""
    world_size: int
    nodes: int
    precision: str


def report_cells(comparison: Comparison) -> list[ReportCell]:
    """Every cell once, in the order of the comparison."""
    return list(
        dict.fromkeys(
            ReportCell(
                job_id=group.record.job_id,
                backend=group.label,
                world_size=group.world_size,
                nodes=group.record.world.nodes,
                precision=group.record.job.training.precision,
            )
            for group in comparison.groups
        )
    )
