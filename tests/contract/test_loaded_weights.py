"""Whatever the loading, every strategy starts from the weights of a plain build, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.loaded_weights import LOADINGS
from tests.contract.ranks import on_ranks
from tests.representatives import EXHAUSTIVE, first

SHARDING = [
    ("fsdp", 2),
    ("fsdp-hybrid", 4),
    ("fsdp1", 2),
    ("fsdp1-hybrid-grad-op", 4),
    ("zero3", 2),
    ("fsdp", 3),
]
FEW = [("fsdp", 3), ("fsdp1", 2), ("zero3", 2)]
"""Each library's; of hybrids the contract sees that they train from the same weights."""


@pytest.mark.parametrize(
    ("name", "ranks", "deed"),
    [
        *((*case, "few_loaded_weights") for case in FEW),
        *(pytest.param(*case, "loaded_weights", marks=EXHAUSTIVE) for case in SHARDING),
    ],
)
def test_slices_and_broadcast_equal_the_whole_model(name: str, ranks: int, deed: str, tmp_path: Path) -> None:
    for per_rank in on_ranks(f"tests.contract.loaded_weights:{deed}", name, ranks, tmp_path):
        for per_case in per_rank:
            assert [said for said, *_ in per_case] == list(LOADINGS)
            whole = per_case[0][1:]
            assert all(loaded[1:] == whole for loaded in per_case)


@pytest.mark.parametrize("name", first(["zero2"], ["ddp", "zero2", "fsdp1-no-shard"]))
def test_a_strategy_that_holds_the_whole_model_builds_it(name: str, tmp_path: Path) -> None:
    for per_rank in on_ranks("tests.contract.loaded_weights:few_loaded_weights", name, 2, tmp_path):
        assert {said for per_case in per_rank for said, *_ in per_case} == {"full"}
