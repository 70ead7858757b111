"""Every launcher that a site file can name starts the same ranks, which train the same."""

import pytest

from harness.record import Record
from tests.cluster.matrices import render
from tests.cluster.slurm import SlurmCluster

pytestmark = [pytest.mark.long(seconds=150), pytest.mark.exhaustive]

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
LAUNCHED = ("ddp", "zero2")


@pytest.fixture(scope="module")
def by_launcher(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Record]]:
    """Two backends on 2 nodes x 2 ranks."""
    found = {}
    for launcher in LAUNCHERS:
        folder = tmp_path_factory.mktemp(launcher)
        cells = ("--backends", ",".join(LAUNCHED), "--nodes", "2", "--nproc", "2")
        matrix = render(cluster, folder, *cells, site=f"launcher: {launcher}\n").without("single")
        matrix.harness("submit", "--wait")
        found[launcher] = {record.backend.label: record for record in matrix.records()}
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_two_ranks_on_each_node(
    by_launcher: dict[str, dict[str, Record]], launcher: str
) -> None:
    records = by_launcher[launcher]
    assert {label: record.status for label, record in records.items()} == {"ddp": "ok", "zero2": "ok"}
    for record in records.values():
        assert (record.world.nodes, record.world.ranks_per_node) == (2, 2)
        hosts = [rank.host for rank in record.ranks]
        assert hosts == sorted(hosts)
        assert len(set(hosts)) == 2


@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_the_launcher_changes_no_loss(by_launcher: dict[str, dict[str, Record]], backend: str) -> None:
    losses = {tuple(step.loss for step in records[backend].steps) for records in by_launcher.values()}
    assert len(losses) == 1
    assert len(losses.pop()) == 8
