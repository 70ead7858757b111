"""What must hold of a job under an axis: every strategy trains it as its own reference does."""

from collections.abc import Sequence

from harness.judge.quantities import RankStates, rank_states, volume_differences, why_unknown
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


def assert_as_derived(
    matrix: Matrix, settings: Sequence[str], labels: Sequence[str]
) -> dict[str, RankStates]:
    """States and traffic of two ranks are the closed forms', to the byte. Return the states of rank 0."""
    found = {}
    for label in labels:
        record = matrix.record(label, 2, settings)
        of_ranks = rank_states(record)
        for states in of_ranks:
            assert states.measured_bytes == states.expected.model_state_bytes, (label, states.rank)
        assert (why_unknown(record), volume_differences(record)) == (None, []), label
        found[label] = of_ranks[0]
    return found
