"""No rank of a strategy that shards weights ever holds the whole model while it is set up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contract.ranks import on_ranks

pytestmark = [
    pytest.mark.long(seconds=40),
    pytest.mark.exhaustive,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status"),
]
MODULE = "tests.contract.setup_memory"
SHARE = 1.25
"""Of what the engine holds; one block comes on top."""


@pytest.mark.parametrize(
    ("name", "ranks"), [("fsdp", 2), ("fsdp", 4), ("fsdp1", 2), ("zero3", 2), ("zero3", 4)]
)
def test_setup_needs_its_shards_and_one_unit(name: str, ranks: int, tmp_path: Path) -> None:
    for rank in on_ranks(f"{MODULE}:of_slices", name, ranks, tmp_path):
        assert rank.held * 2 >= rank.parameters / ranks
        assert rank.added_peak <= SHARE * rank.held + rank.block


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_a_large_embedding_is_one_unit(name: str, tmp_path: Path) -> None:
    """DeepSpeed would gather it to attach its hook, and gloo copy it: there twice."""
    for rank in on_ranks(f"{MODULE}:of_a_large_embedding", name, 4, tmp_path):
        assert rank.added_peak <= SHARE * rank.held + rank.block


@pytest.mark.parametrize("name", ["fsdp", "fsdp1"])
def test_the_whole_model_exceeds_that(name: str, tmp_path: Path) -> None:
    for rank in on_ranks(f"{MODULE}:of_whole_model", name, 2, tmp_path):
        assert rank.added_peak > SHARE * rank.held + rank.block


@pytest.mark.parametrize("name", ["fsdp", "fsdp1", "zero3"])
def test_a_digest_needs_one_unit_and_a_copy(name: str, tmp_path: Path) -> None:
    for rank in on_ranks(f"{MODULE}:of_slices", name, 2, tmp_path):
        assert rank.digest_peak <= 2 * rank.block + rank.parameters / 10
