"""Strong and weak scaling: the tables that compute-time proposals ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.metrics import STEP
from harness.judge.scaling import ScalingPoint, strong_scaling, weak_scaling
from harness.tell.document import Block, Heading, Paragraph, Section, Table
from harness.tell.formats import percent
from harness.tell.order_words import LEGEND, shown_ratio
from harness.tell.pictures.scaling import strong_picture, weak_picture
from harness.tell.tables import prose, table_columns

STRONG_TEXT = prose("scaling_strong", legend=LEGEND)
WEAK_TEXT = prose("scaling_weak", legend=LEGEND)


def scaling_section(comparison: Comparison) -> Section | None:
    """None where nothing was run on several numbers of ranks."""
    strong, weak = strong_scaling(comparison), weak_scaling(comparison)
    blocks: list[Block] = []
    for curves, heading, text, table, picture in (
        (strong, "Strong scaling", STRONG_TEXT, _strong_table(strong), strong_picture(strong)),
        (weak, "Weak scaling", WEAK_TEXT, _weak_table(weak), weak_picture(weak)),
    ):
        if curves and picture is not None:
            blocks += [Heading(heading), picture, table, Paragraph(text)]
    return Section("scaling", "Scaling", blocks) if blocks else None


def _strong_table(curves: Sequence[Sequence[ScalingPoint]]) -> Table:
    """Every point once: a reference that is the base of many stands before them."""
    points = {point.group.key: point for curve in curves for point in curve}
    ordered = sorted(points.values(), key=lambda point: not point.group.is_reference)
    body = []
    for point in ordered:
        figures = [
            point.training_seconds,
            shown_ratio(point.ratio) or point.speed_up,
            point.strong_efficiency,
        ]
        body.append([*_head(point), *figures, _base(point), *_details(point)])
    return Table(key="strong_scaling", columns=table_columns("scaling_strong"), rows=body)


def _base(point: ScalingPoint) -> str:
    """'itself, 1' where the backend is its own base and has there but one layout, else by its name."""
    own = point.base.label in (point.group.label, point.group.backend)
    return f"{'itself' if own else point.base.label}, {point.base.world_size}"


def _weak_table(curves: Sequence[Sequence[ScalingPoint]]) -> Table:
    body = []
    for curve in curves:
        for point in curve:
            record = point.group.record
            weights = record.initial_weights
            line = [
                weights.parameter_count if weights else None,
                record.job.training.global_batch_size,
                point.work_ratio,
                point.step_seconds,
                shown_ratio(point.ratio, percent) or point.weak_efficiency,
            ]
            body.append([*_head(point), *line, *_details(point)])
    return Table(key="weak_scaling", columns=table_columns("scaling_weak"), rows=body)


def _head(point: ScalingPoint) -> list[Any]:
    world = point.group.record.world
    steps = point.group.values(STEP)
    sizes = [world.nodes, world.world_size, world.threads_per_rank]
    return [point.group.label, *sizes, len(steps), min(steps), max(steps)]


def _details(point: ScalingPoint) -> list[Any]:
    group = point.group
    record = group.record
    return [
        group.figures["samples_per_second"],
        group.figures["peak_bytes"],
        record.steps[-1].loss if record.steps else None,
        record.eval[-1].loss if record.eval else None,
        group.figures["evaluation_samples_per_second"],
    ]
