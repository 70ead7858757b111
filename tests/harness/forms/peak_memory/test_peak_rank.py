"""The fullest rank against all ranks."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.backends.registry import BUILT_IN
from harness.forms.families import model_states
from harness.forms.peak_memory.families import peak_rank
from harness.forms.workload import Workload
from tests.geometries import bloom_workload, small_workload, under
from tests.harness.plan.plans import scenario

SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp1", "fsdp1-grad-op", "fsdp-hybrid", "fsdp1-hybrid")
SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)


def device_bytes(workload: Workload) -> int:
    """On a GPU, where counters of steps lie on the host."""
    return sum(model_states(workload).kinds(host=False).values())


def assert_fullest(workload: Workload) -> None:
    most = max(device_bytes(replace(workload, rank=rank)) for rank in range(workload.world_size))
    assert device_bytes(replace(workload, rank=peak_rank(workload))) == most


@settings(max_examples=60)
@given(shapes=SHAPES, backend=st.sampled_from(SHARDED), world_size=st.sampled_from([1, 2, 4, 6, 8]),
       precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]), offload=st.booleans())  # fmt: skip
def test_no_rank_holds_more(
    shapes: list[tuple[int, int]], backend: str, world_size: int, precision: str, offload: bool
) -> None:
    changes: dict[str, Any] = {"world_size": world_size, "precision": precision, "device": "cuda"}
    if BUILT_IN[backend].strategy.facts.has_replicas:  # type: ignore[union-attr]
        changes["shard_size"] = max(1, world_size // 2)
    if offload:
        changes["options"] = {"offload": "cpu"}
    assert_fullest(under(backend, small_workload(*shapes, **changes)))


@pytest.mark.parametrize("backend", SHARDED[:6])
@pytest.mark.parametrize("world_size", [3, 64])
def test_no_rank_of_bloom_holds_more(backend: str, world_size: int) -> None:
    assert_fullest(
        under(backend, bloom_workload(world_size=world_size, precision="bf16-mixed", device="cuda"))
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_rank_of_cut_layers_holds_more(stage: int) -> None:
    given = scenario(f"autotp-zero{stage}", 8)
    most = max(device_bytes(given.workload(rank)) for rank in range(8))
    assert device_bytes(given.workload()) == most
