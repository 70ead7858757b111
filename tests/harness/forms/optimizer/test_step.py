from __future__ import annotations

from typing import Any

import pytest

from harness.forms.optimizers import implementation, step_temporary, updated_tensors
from tests.geometries import bloom_workload, small_workload, under

SHAPES = ((10, 4), (6, 4), (8, 4))
"""40, 24 and 32 elements; all of them decay, so they are one group."""


def temporary(backend: str, name: str, **changes: Any) -> int:
    return step_temporary(
        under(backend, small_workload(*SHAPES, optimizer_implementation=name, **changes))
    ).bytes


def test_foreach_holds_the_roots_of_a_group() -> None:
    assert temporary("ddp", "foreach") == 4 * (40 + 24 + 32)


def test_the_loop_holds_two_of_a_tensor_and_the_last_quotient() -> None:
    assert temporary("ddp", "for-loop") == 4 * max(2 * 40, 2 * 24 + 40, 2 * 32 + 24)


def test_fused_holds_nothing() -> None:
    assert temporary("ddp", "fused") == 0


def test_groups_are_updated_one_after_the_other() -> None:
    bloom = under("ddp", bloom_workload(optimizer_implementation="foreach"))
    matrices, rest = (sum(t.numel for t in group) for group in bloom.layout.groups())
    assert matrices + rest == 559_214_592
    assert step_temporary(bloom).bytes == 4 * matrices


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_the_loop_takes_twice_of_foreach_on_flat_partitions(backend: str) -> None:
    assert temporary(backend, "foreach") == 4 * (40 + 24 + 32) // 2
    assert temporary(backend, "for-loop") == 2 * temporary(backend, "foreach")


@pytest.mark.parametrize("backend", ["fsdp", "fsdp1", "zero1", "zero3"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_pieces_of_all_ranks_are_the_model(backend: str, ranks: int) -> None:
    pieces = [
        sum(map(sum, updated_tensors(under(backend, small_workload(*SHAPES, world_size=ranks, rank=rank)))))
        for rank in range(ranks)
    ]
    padding = {"fsdp": 0, "fsdp1": 0}.get(backend, 2 * ranks)
    assert 96 <= sum(pieces) <= 96 + padding


def test_torch_chooses_foreach_on_cuda_only() -> None:
    assert implementation(under("ddp", bloom_workload(device="cuda"))) == "foreach"
    assert implementation(under("ddp", bloom_workload(device="cpu"))) == "for-loop"


def test_offloaded_states_are_updated_on_the_host() -> None:
    workload = under("fsdp", bloom_workload(device="cuda", options={"offload": "cpu"}))
    assert implementation(workload) == "for-loop"
    assert step_temporary(workload).host


def test_bf16_states_have_bf16_roots() -> None:
    assert 2 * temporary("ddp", "foreach", precision="bf16") == temporary("ddp", "foreach")


def test_each_implementation_names_its_source() -> None:
    for name, function in (
        ("for-loop", "_single_tensor_adam"),
        ("foreach", "_multi_tensor_adam"),
        ("fused", "_fused_adam"),
    ):
        found = step_temporary(under("ddp", bloom_workload(optimizer_implementation=name)))
        assert found.implementation == name
        assert found.source.endswith(function)
