"""Memory that the update takes for a moment, by implementation of AdamW: allocator against formula."""

from collections.abc import Iterator

import pytest

from harness.forms.optimizers import step_temporary
from harness.record import Record
from harness.record.workload import of_record
from tests.memory.conftest import LLAMA, compare

pytestmark = [pytest.mark.long(seconds=12), pytest.mark.costly]

BACKENDS = ("single", "ddp", "fsdp", "fsdp1", "zero2", "zero3")
FEW = ("single", "fsdp", "zero3")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
BESIDE_BYTES = 64
"""Buffers of a few bytes that gloo's threads have not let go of yet."""
BESIDE_FUSED_BYTES = 1024
"""A fused update allocates nothing, so scalars of the gradient norm make the peak."""

Records = dict[tuple[str, str], Record]


@pytest.fixture(scope="module", params=[FEW, pytest.param(BACKENDS, marks=pytest.mark.exhaustive)])
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    found: Records = {}
    for name in IMPLEMENTATIONS:
        settings = (f"model.config={LLAMA}", f"optimizer.implementation={name}")
        folder = tmp_path_factory.mktemp(name)
        outcome = compare(folder, ",".join(request.param[1:]), 2, *settings)
        found |= {(name, label): record for label, record in outcome.records.items()}
    return found


def test_the_library_runs_the_implementation_that_was_asked_for_in_one_job(records: Records) -> None:
    for (name, backend), record in records.items():
        effective = record.backend.effective
        assert effective.optimizer_implementation == name, backend
    assert len({record.job_id for record in records.values()}) == 1
    assert len({record.cell for record in records.values()}) == len(records)


def test_the_peak_of_the_update_differs_by_the_temporary_alone(records: Records) -> None:
    for backend, by_name in each(records):
        loop, foreach, fused = map(_peaks_beyond_the_temporary, by_name)
        assert foreach == pytest.approx(loop, abs=BESIDE_BYTES), backend
        assert fused == pytest.approx(loop, abs=BESIDE_FUSED_BYTES), backend
        # They are large enough to be told apart.
        loop, foreach, fused = map(_temporaries, by_name)
        assert all(abs(a - b) > 10 * BESIDE_FUSED_BYTES for a, b in zip(loop, foreach, strict=True)), backend
        assert set(fused) == {0}
        loop, foreach, fused = ([step.loss for step in record.steps] for record in by_name)
        assert foreach == loop, backend
        assert fused == pytest.approx(loop, abs=1e-5), backend


def each(records: Records) -> Iterator[tuple[str, list[Record]]]:
    """Backends, each with its records in the order of the implementations."""
    for backend in dict.fromkeys(backend for _, backend in records):
        yield backend, [records[name, backend] for name in IMPLEMENTATIONS]


def _peaks_beyond_the_temporary(record: Record) -> list[int]:
    """By rank: the least peak of a probed update, without what the formula gives for its temporary."""
    peaks = [
        min(row.peak_bytes or 0 for row in rank.memory if row.moment == "after_step") for rank in record.ranks
    ]
    return [peak - temporary for peak, temporary in zip(peaks, _temporaries(record), strict=True)]


def _temporaries(record: Record) -> list[int]:
    workloads = [of_record(record, rank.rank) for rank in record.ranks]
    return [step_temporary(workload).bytes for workload in workloads if workload is not None]
