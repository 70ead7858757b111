"""Runs that cut the same global batch in different ways, or otherwise than they were asked to."""

from __future__ import annotations

from harness.backends.registry import REFERENCE
from harness.compare.findings.finding import Finding, Kind
from harness.compare.rows import Row
from harness.compare.runs import Runs
from harness.compare.wording import ranks

KINDS = (
    Kind(
        id="micro-batch-differs",
        title="Backends of one world size cut the global batch differently",
        cause="Micro-batch and accumulation were chosen per backend, so that speed and memory differ by "
        "them and not by the strategy.",
        confirm="The values list each cut with its backends.",
        fix="Give all backends the same `training.micro_batch_size` and `training.accumulation_steps`.",
    ),
    Kind(
        id="accumulation-differs",
        title="The library accumulates over another number of micro-steps than the loop",
        cause="Its own configuration has another number of accumulation steps, so it divides the loss, "
        "synchronises or steps at other micro-steps than the loop means.",
        confirm="`effective.accumulation_steps` against `world.accumulation_steps` of the record.",
        fix="DeepSpeed: `gradient_accumulation_steps` must equal the loop's; Accelerate: the same of "
        "`Accelerator` or its DeepSpeedPlugin; torch has no such setting.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One finding per world size at which cuts differ, and one per run that accumulates otherwise."""
    layouts: dict[int, dict[str, list[str]]] = {}
    for row in runs.rows:
        world = row.record.world
        if row.record.backend.name != REFERENCE and row.record.status == "ok":
            cut = f"{world.micro_batch_size} x {world.accumulation_steps}"
            layouts.setdefault(world.world_size, {}).setdefault(cut, []).append(row.backend)
    return [*_cuts(layouts), *(finding for row in runs.rows if (finding := _accumulation(row)) is not None)]


def _accumulation(row: Row) -> Finding | None:
    asked = row.record.world.accumulation_steps
    given = (row.record.backend.effective or {}).get("accumulation_steps", asked)
    if given == asked:
        return None
    return Finding(
        id="accumulation-differs",
        about=row.cell,
        text=f"the library accumulates over {given} micro-steps, the loop over {asked}",
        values={"asked": asked, "given": given},
    )


def _cuts(layouts: dict[int, dict[str, list[str]]]) -> list[Finding]:
    return [
        Finding(
            id="micro-batch-differs",
            about=tuple(sorted({label for labels in cuts.values() for label in labels})),
            text=f"on {ranks(size)} micro-batch x accumulation differs: " + ", ".join(sorted(cuts)),
            values=cuts,
        )
        for size, cuts in layouts.items()
        if len(cuts) > 1
    ]
