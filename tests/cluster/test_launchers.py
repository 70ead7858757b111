"""Every launcher of a site file, and torchrun without `harness slurm`, start the same ranks."""

import sys
from pathlib import Path

import pytest

from harness.record import Record
from tests.cluster.matrices import render
from tests.cluster.slurm import SlurmCluster
from tests.representatives import EXHAUSTIVE

pytestmark = pytest.mark.long(seconds=200)
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


@EXHAUSTIVE
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


@EXHAUSTIVE
@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_the_launcher_changes_no_loss(by_launcher: dict[str, dict[str, Record]], backend: str) -> None:
    losses = {tuple(step.loss for step in records[backend].steps) for records in by_launcher.values()}
    assert len(losses) == 1
    assert len(losses.pop()) == 8


TINY = """\
model:
  config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 2}
data: {sequence_length: 32}
training: {steps: 4}
measure: {warmup_steps: 1, probed_steps: 1, traced_steps: 0}
"""


@pytest.mark.parametrize(
    "shared", [pytest.param(True, id="shared", marks=EXHAUSTIVE), pytest.param(False, id="apart")]
)
def test_two_nodes_leave_one_record(cluster: SlurmCluster, tmp_path: Path, shared: bool) -> None:
    """Also where each node has a runs folder of its own: here its private /dev/shm."""
    (tmp_path / "job.yaml").write_text(TINY)
    runs = str(tmp_path / "runs") if shared else f"/dev/shm/{tmp_path.name}"
    done = cluster.command(
        "srun", "--nodelist=node1,node2", "--ntasks-per-node=1", "--cpus-per-task=2",
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--rdzv-backend=c10d", "--rdzv-id=2", "--rdzv-endpoint=node1:29124", "-m", "harness", "run",
        "--backend", "fsdp-hybrid", "--config", tmp_path / "job.yaml", "--runs", runs, "--json",
        cwd=tmp_path, GLOO_SOCKET_IFNAME="hsn0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    record = Record.model_validate_json(done.stdout)
    assert (record.status, len(record.steps)) == ("ok", 4)
    assert (record.world.nodes, record.world.ranks_per_node) == (2, 2)
    hosts = [rank.host for rank in record.ranks]
    assert hosts == ["node1", "node1", "node2", "node2"]
    assert [node.host for node in record.environment.nodes] == ["node1", "node2"]
    assert {row.rank for row in record.comm} == {0, 1, 2, 3}
    assert (tmp_path / "runs").exists() == shared
