"""Activation checkpointing of some blocks, and of blocks that keep their products, under each strategy."""

import pytest

from .parity import NATIVE, assert_parity, together

SETTING = "training.activation_checkpointing"


@pytest.mark.costly
def test_every_second_block_recomputes_where_weights_are_gathered_again(matrix) -> None:
    records = assert_parity(matrix, together(), ["zero3", "fsdp"])
    assert all(record.observed.activation_checkpointing for record in records.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", ["every-2", "selective"])
def test_every_strategy_recomputes_a_part(checkpointing: str, precision: str, matrix) -> None:
    assert_parity(matrix, [f"{SETTING}={checkpointing}", f"training.precision={precision}"], NATIVE)
