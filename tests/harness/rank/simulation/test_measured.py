"""Simulated ranks against ranks that ran: the published full matrix, on 1, 2 and 4 ranks over gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.forms.terms import STATE_KINDS, STEP_PHASES
from harness.job.experiment import Experiment
from harness.judge.quantities import rank_states
from harness.plan.simulation import plan_simulation, run_simulations, simulated_peaks
from harness.record import CommunicationPart, Record
from harness.record.store import read_runs
from harness.run_directory.request import SimulatedRank, Tensors

pytestmark = [pytest.mark.long(seconds=90), pytest.mark.exhaustive]

RUNS = Path(__file__).parents[4] / "reports" / "full-matrix" / "runs.tar.xz"
OF_FEW_RANKS = ("ddp", "fsdp", "fsdp1", "zero1", "zero2", "zero3")
"""Compared on 1 and 2 ranks; on 4 every backend is."""
KERNELS_BYTES = 32
"""Scalars that kernels of the optimizer's update allocate for themselves."""
LOSS_GRADIENT_BYTES = 4
"""What `PassWatch` keeps of a backward pass until the step is over, which it did not when these ran."""
Case = tuple[Record, SimulatedRank]


def tensors_of(world_size: int) -> Tensors:
    return "fake" if world_size == 4 else "real"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    runs, _ = read_runs([RUNS])
    records: dict[tuple[str, int], Record] = {}
    for _, record in runs:
        label, size = record.backend.label, record.world.world_size
        compared = size == 4 or label in OF_FEW_RANKS
        if record.status == "ok" and record.comm and compared and not label.startswith("planted-"):
            records.setdefault((label, size), record)
    asked = [
        plan_simulation(
            Experiment(**record.job.model_dump()), label, size, ranks_per_node=size, rank=size - 1,
            tensors=tensors_of(size),
        )
        for (label, size), record in records.items()
    ]  # fmt: skip
    results = run_simulations(asked)
    return list(zip(records.values(), results, strict=True))


def each(cases: list[Case]) -> Iterator[tuple[str, Record, SimulatedRank]]:
    for record, result in cases:
        name = f"{record.backend.label} on {record.world.world_size}, measured with {record.backend.versions}"
        yield name, record, result


def test_every_backend_of_the_matrix_can_be_simulated(cases: list[Case]) -> None:
    assert {(record.world.world_size) for record, _ in cases} == {1, 2, 4}
    assert len([record for record, _ in cases if record.world.world_size == 4]) >= 16
    for name, _, result in each(cases):
        assert result.status == "ok", f"{name}: {result.reason}"


def test_collectives_are_those_of_the_run(cases: list[Case]) -> None:
    for name, record, result in each(cases):
        own = [part for part in record.comm if part.rank == record.world.world_size - 1]
        assert counts(result.communication, steps=1) == counts(own, steps=record.windows.probed), name


def test_states_are_those_of_the_run_to_the_byte(cases: list[Case]) -> None:
    for name, record, result in each(cases):
        simulated = next(part for part in result.memory if part.moment == "after_backward")
        held, expected = simulated.all_kinds(), rank_states(record)[-1].measured
        for kind in STATE_KINDS:
            assert held.get(kind, 0) == expected.get(kind, 0), f"{name}: {kind}"


def test_peaks_are_those_of_the_run_without_its_data_set(cases: list[Case]) -> None:
    for name, record, result in each(cases):
        step = rank_states(record)[-1].step
        parts = {str(part.moment): part for part in record.ranks[-1].memory if part.step == step}
        data = (parts["after_backward"].kinds or {})["data"]
        for moment, peak in simulated_peaks(result).items():
            part, kept = parts[moment], LOSS_GRADIENT_BYTES if moment != "after_forward" else 0
            assert part.peak_bytes is not None
            assert 0 <= part.peak_bytes + kept - data - peak <= KERNELS_BYTES, f"{name}: {moment}"


def counts(rows: list[CommunicationPart], *, steps: int) -> dict[tuple[str, str, str, str, int], list[float]]:
    """Calls and payload of a step by phase, collective, dtype, role and size of the group."""
    sums: dict[tuple[str, str, str, str, int], list[float]] = {}
    for row in rows:
        if row.phase in STEP_PHASES:
            total = sums.setdefault((row.phase, row.op, row.dtype, row.role, row.group_size), [0, 0])
            total[0] += row.calls / steps
            total[1] += row.payload_bytes / steps
    return sums
