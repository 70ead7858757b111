"""Packed documents that are kept apart, under each strategy."""

import pytest

from .parity import NATIVE, assert_parity, packed, together


def test_sharded_strategies_keep_documents_apart(matrix) -> None:
    records = assert_parity(matrix, together(), ["zero3", "fsdp"])
    data = records["single"].data
    assert data.target_tokens < data.samples * 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_every_strategy_keeps_documents_apart(precision: str, matrix, tmp_path_factory) -> None:
    asked = packed(tmp_path_factory.mktemp("documents"))
    assert_parity(matrix, [*asked, f"training.precision={precision}", "loss.chunk_tokens=16"], NATIVE)
