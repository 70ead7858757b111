"""The self-test of the network, run under Slurm on two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.fabric.result import FabricResult, read_fabric
from tests.cluster.slurm import SlurmCluster


def measured_fabric(
    cluster: SlurmCluster, folder: Path, *words: str, ranks_per_node: int = 1
) -> FabricResult:
    """Start `harness fabric` by srun and torchrun; its result stays in `folder`/fabric.json."""
    cluster.command(
        "srun", "--nodelist=node1,node2", "--ntasks-per-node=1",
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks_per_node}",
        "--rdzv-backend=c10d", "--rdzv-id=1", "--rdzv-endpoint=node1:29123", "-m", "harness", "fabric",
        "--device", "cpu", "--output", folder / "fabric.json", *words,
        cwd=folder, GLOO_SOCKET_IFNAME="hsn0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    return read_fabric(folder / "fabric.json")
