"""`harness run` under srun and torchrun, without `harness slurm`."""

import sys
from pathlib import Path

import pytest

from harness.record import Record
from tests.cluster.slurm import SlurmCluster
from tests.representatives import EXHAUSTIVE

pytestmark = pytest.mark.long(seconds=50)

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
