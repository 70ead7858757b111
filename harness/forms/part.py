"""What one part of a divided model is to the strategy that replicates or shards it."""

from __future__ import annotations

from dataclasses import replace

from harness.backends.mesh import Mesh
from harness.forms import pipeline, tensor
from harness.forms.workload import Workload
from harness.forms.zero import zero_tensor

UNDERNEATH = {"tensor": "single", "fsdp2-tensor": "fsdp2"}
"""Family of ranks that cut layers -> that of the ranks which hold the same part of them."""


def local_workload(workload: Workload) -> Workload:
    """The workload of the ranks that hold the same part of each layer; itself where none is cut.

    Its model is what one rank holds, its ranks those with samples of their own.
    """
    mesh = workload.mesh
    if mesh is None or mesh.size("tensor") == 1:
        return workload
    family = workload.strategy.family
    if family in zero_tensor.UNDERNEATH:
        return zero_tensor.zero_workload(workload)
    return replace(
        workload,
        layout=tensor.cut(workload),
        strategy=replace(workload.strategy, family=UNDERNEATH.get(family, family)),
        world_size=mesh.data_size,
        shard_size=mesh.size("shard") if mesh.size("shard") > 1 else None,
        rank=mesh.data_rank(workload.rank),
        mesh=Mesh.data_parallel(mesh.data_size),
    )


def samples_at_once(workload: Workload) -> int:
    """Samples that one pass of a rank computes: a pipeline cuts the micro-step into micro-batches."""
    if not workload.strategy.facts.cuts_layers:
        return workload.micro_batch_size
    return workload.micro_batch_size // pipeline.micro_batches_of(workload)
