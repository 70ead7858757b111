"""Mistakes that only a pipeline can make."""

from __future__ import annotations

from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row


def find(runs: Runs) -> list[Finding]:
    """Each run of a pipeline whose ends hold different copies of a weight."""
    return [finding for row in runs.rows if (finding := _apart(row)) is not None]


def _apart(row: Row) -> Finding | None:
    record, effective = row.record, row.record.backend.effective
    shared = effective.details.get("tied_across_stages") if effective else None
    if not shared:
        return None
    digests: dict[int, set[str]] = {}
    for rank in record.ranks:
        if rank.final_digest is not None:
            digests.setdefault(record.world.mesh.data_rank(rank.rank), set()).add(rank.final_digest)
    if all(len(of_pipeline) < 2 for of_pipeline in digests.values()):
        return None
    return Finding(
        id="tied-weight-apart",
        about=row.cell,
        text=f"the first and the last stage hold different copies of {', '.join(shared)}, which the model "
        "ties: their gradients were not added up",
        values={"weights": list(shared)},
    )
