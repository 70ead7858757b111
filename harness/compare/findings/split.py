"""Runs that cut the same global batch in different ways."""

from __future__ import annotations

from collections.abc import Sequence

from backends.registry import REFERENCE
from harness.compare.findings.finding import Finding, Kind
from harness.compare.rows import Row

KINDS = (
    Kind(
        id="micro-batch-differs",
        title="Backends of one world size cut the global batch differently",
        cause="Micro-batch and accumulation were chosen per backend, so that speed and memory differ by "
        "them and not by the strategy.",
        confirm="The values list each cut with its backends.",
        fix="Give all backends the same `training.micro_batch_size` and `training.accumulation_steps`.",
    ),
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """One finding per world size at which cuts differ."""
    layouts: dict[int, dict[str, list[str]]] = {}
    for row in rows:
        world = row.record.world
        if row.record.backend.name != REFERENCE and row.record.status == "ok":
            cut = f"{world.micro_batch_size} x {world.accumulation_steps}"
            layouts.setdefault(world.world_size, {}).setdefault(cut, []).append(row.record.backend.label)
    return [
        Finding(
            id="micro-batch-differs",
            backends=tuple(sorted({label for labels in cuts.values() for label in labels})),
            message=f"on {size} ranks micro-batch x accumulation differs: " + ", ".join(sorted(cuts)),
            values=cuts,
        )
        for size, cuts in layouts.items()
        if len(cuts) > 1
    ]
