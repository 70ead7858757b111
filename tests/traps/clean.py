"""The clean matrix: what must hold where nothing is wrong."""

from __future__ import annotations

from .matrix import Matrix, clean_labels

ACCUMULATIONS = (1, 4)
PRECISIONS = ("fp32", "bf16-mixed")


def assert_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally: dict[str, list[int]]
) -> None:
    """Run every backend on this many ranks; none may raise a finding or differ from the reference."""
    settings = (
        f"training.precision={precision}", f"training.accumulation_steps={accumulation}",
        "training.global_batch_size=16",
    )  # fmt: skip
    labels = clean_labels(world_size)
    found = matrix.findings(labels, world_size, settings)
    tally["clean"][0] += len(found)
    tally["clean"][1] += len(labels)
    assert [(f.id, f.message) for f in found] == []
    comparison = matrix.compare(labels, world_size, settings)
    wanted = {"exact", "tight"} if precision == "fp32" else {"exact", "tight", "band"}
    parity = {row.record.backend.label: row.judgement.parity for row in comparison.rows}
    assert {label: found for label, found in parity.items() if found not in wanted} == {}
