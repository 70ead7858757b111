"""Buckets of DeepSpeed's reductions."""

import pytest

from harness.backends.registry import strategy_of
from harness.forms.layout import Layout, Tensor
from harness.forms.workload import Workload
from harness.forms.zero0 import buckets_filled


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ((10, 10, 10), 30, 1),
        ((10, 10, 10), 20, 2),
        ((10, 1000, 10), 20, 3),  # the large one is reduced alone, and in one piece
        ((1000, 1000), 20, 2),
        ((5, 20, 5, 15), 20, 3),  # from the last: 15 + 5, then 20, then 5
    ],
)
def test_a_gradient_is_never_split_over_buckets(sizes: tuple[int, ...], limit: int, buckets: int) -> None:
    strategy = strategy_of("zero3")
    assert strategy is not None
    parameters = tuple(Tensor(f"p{index}", (size,), "float32") for index, size in enumerate(sizes))
    workload = Workload(
        layout=Layout(parameters=parameters, decaying=frozenset()), strategy=strategy, world_size=2,
        options={"reduce_bucket_size": limit},
    )  # fmt: skip
    assert buckets_filled(workload) == buckets
