"""Tensors without data against tensors with data, where libraries cut parameters into many pieces."""

import pytest

from harness.job.config import load_experiment
from harness.plan.simulation import plan_simulation, run_simulations, simulated_peaks
from harness.rank.simulation.fake_tensors import FEW
from harness.run_directory.request import Tensors
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=10)

RANKS = 2 * FEW
ROUNDED_BYTES = 1024
"""Empty shards that have a size in one of both, and scalars that kernels allocate."""


KINDS: tuple[Tensors, ...] = ("fake", "real")


@pytest.mark.parametrize("backend", first(["fsdp"], ["fsdp", "fsdp1"]))
def test_tensors_without_data_give_the_same_figures(backend: str) -> None:
    asked = [
        plan_simulation(load_experiment(None), backend, RANKS, ranks_per_node=8, rank=RANKS - 1, tensors=kind)
        for kind in KINDS
    ]
    fake, real = run_simulations([one.request for one in asked])
    assert (fake.status, real.status) == ("ok", "ok"), (fake.reason, real.reason)
    key = ("phase", "op", "dtype", "group_ranks", "calls", "payload_bytes", "largest_bytes")
    assert [[getattr(part, name) for name in key] for part in fake.communication] == [
        [getattr(part, name) for name in key] for part in real.communication
    ]
    assert fake.communication
    for moment, peak in simulated_peaks(fake).items():
        assert 0 <= simulated_peaks(real)[moment] - peak <= ROUNDED_BYTES, moment
