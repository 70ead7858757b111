"""Runs that split the same global batch in different ways, or not as requested."""

from __future__ import annotations

from harness.backends.registry import REFERENCE
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.wording import ranks


def find(runs: Runs) -> list[Finding]:
    """One finding per world size with different splits, and one per run that accumulates differently.

    Where ranks share samples the batch is cut over fewer data ranks: only runs with as many are alike.
    """
    layouts: dict[tuple[int, int], dict[str, list[str]]] = {}
    for row in runs.rows:
        world = row.record.world
        if row.record.backend.name != REFERENCE and row.record.status == "ok":
            split = f"{world.micro_batch_size} x {world.accumulation_steps}"
            layouts.setdefault((world.world_size, world.data_size), {}).setdefault(split, []).append(
                row.backend
            )
    return [*_splits(layouts), *(finding for row in runs.rows if (finding := _accumulation(row)) is not None)]


def _accumulation(row: Row) -> Finding | None:
    asked = row.record.world.accumulation_steps
    effective = row.record.backend.effective
    given = effective.accumulation_steps if effective else asked
    if given == asked:
        return None
    return Finding(
        id="accumulation-differs",
        about=row.cell,
        text=f"the library accumulates over {given} micro-steps, the loop over {asked}",
        values={"asked": asked, "given": given},
    )


def _splits(layouts: dict[tuple[int, int], dict[str, list[str]]]) -> list[Finding]:
    return [
        Finding(
            id="micro-batch-differs",
            about=tuple(sorted({label for labels in splits.values() for label in labels})),
            text=f"on {ranks(size)} micro-batch x accumulation differs: " + ", ".join(sorted(splits)),
            values=splits,
        )
        for (size, _), splits in layouts.items()
        if len(splits) > 1
    ]
