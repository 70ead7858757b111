"""What the self-test asks of the transport."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.fabric.measurement import FabricTest


@pytest.fixture(autouse=True)
def group() -> Any:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_reductions_sum_zeros_since_nccl_reduces_nothing_else_within_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, Any, float]] = []
    all_reduce, reduce_scatter = dist.all_reduce, dist.reduce_scatter_tensor

    def noted_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> Any:
        work = all_reduce(tensor, op, **rest)
        if tensor.dtype == torch.float32:  # others agree on times and sizes
            asked.append(("all_reduce", op, float(tensor.abs().max())))
        return work

    def noted_reduce_scatter(
        part: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any
    ) -> Any:
        work = reduce_scatter(part, tensor, op, **rest)
        asked.append(("reduce_scatter", op, float(part.abs().max())))
        return work

    monkeypatch.setattr(dist, "all_reduce", noted_all_reduce)
    monkeypatch.setattr(dist, "reduce_scatter_tensor", noted_reduce_scatter)
    test = FabricTest("cpu", repeats=2)
    result = test.run(4096, ["all_gather", "all_reduce", "reduce_scatter"])
    assert [row.size_bytes for row in result.rows if row.op == "all_reduce"] == [1024, 4096]
    assert set(asked) == {
        ("all_reduce", dist.ReduceOp.SUM, 0.0),
        ("reduce_scatter", dist.ReduceOp.SUM, 0.0),
    }
