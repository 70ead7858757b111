"""Tensors without data against tensors with data, where libraries cut parameters into many pieces."""

import pytest

from harness.job.config import load_experiment
from harness.plan.simulation import plan_simulation, run_simulations, simulated_peaks
from harness.rank.simulation.fake_tensors import FEW
from harness.run_directory.simulation import SimulatedRank, Tensors

pytestmark = pytest.mark.long(seconds=15)

RANKS = 2 * FEW
BACKENDS = ("fsdp", "fsdp1")
ROUNDED_BYTES = 1024
"""Empty shards that have a size in one of both, and scalars that kernels allocate."""


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, Tensors], SimulatedRank]:
    cases: list[tuple[str, Tensors]] = [(name, kind) for name in BACKENDS for kind in ("fake", "real")]
    asked = [
        plan_simulation(load_experiment(None), name, RANKS, ranks_per_node=8, rank=RANKS - 1, tensors=kind)
        for name, kind in cases
    ]
    return dict(zip(cases, run_simulations([one.request for one in asked]), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_data_give_the_same_figures(
    results: dict[tuple[str, Tensors], SimulatedRank], backend: str
) -> None:
    fake, real = results[backend, "fake"], results[backend, "real"]
    assert (fake.status, real.status) == ("ok", "ok"), (fake.reason, real.reason)
    key = ("phase", "op", "dtype", "group_ranks", "calls", "payload_bytes", "largest_bytes")
    assert [[getattr(part, name) for name in key] for part in fake.communication] == [
        [getattr(part, name) for name in key] for part in real.communication
    ]
    assert fake.communication
    for moment, peak in simulated_peaks(fake).items():
        assert 0 <= simulated_peaks(real)[moment] - peak <= ROUNDED_BYTES, moment
