"""What must hold of a job under an axis: every strategy trains it as its own reference does."""

from __future__ import annotations

from collections.abc import Sequence

from harness.launch.cells import canonical_label
from harness.record import Record
from tests.traps.matrix import Matrix

NATIVE = ("ddp", "zero1", "zero3", "fsdp", "fsdp1")


def assert_parity(
    matrix: Matrix, settings: Sequence[str], labels: Sequence[str] = NATIVE, world_size: int = 2
) -> dict[str, Record]:
    """Run the job under each of them; none may raise a finding. Return the records by canonical label."""
    found = [(f.id, f.message) for f in matrix.findings(labels, world_size, settings)]
    assert found == [], found
    rows = matrix.compare(labels, world_size, settings).rows
    assert {row.record.backend.label for row in rows} == {"single", *map(canonical_label, labels)}
    levels = {row.record.backend.label: row.judgement.parity for row in rows}
    low = any(word in setting for setting in settings for word in ("bf16", "8bit", "fp8"))
    assert set(levels.values()) <= {"exact", "tight", *(["band"] if low else [])}, levels
    return {row.record.backend.label: row.record for row in rows}
