"""AdamW with 8-bit moments under each strategy: states to the byte, full width where torchao falls back."""

import pytest

from .parity import assert_parity

torchao = pytest.importorskip("torchao", reason="the extra low-bit is not installed")
pytestmark = pytest.mark.long(seconds=40)
KIND = "optimizer.kind=adamw-8bit"
MODEL = (
    "model.config={hidden_size: 64, intermediate_size: %d, num_hidden_layers: %d, num_attention_heads: 2, "
)
MODEL += "num_key_value_heads: 2, max_position_embeddings: 16, vocab_size: 320}"
EVEN = MODEL % (128, 2)
"""Halves of its groups are multiples of 256 elements."""
ODD = MODEL % (132, 1)
"""Every matrix is a multiple of 256 elements, half of all of them is not."""
PARTS = ("ddp", "zero1", "zero3", "fsdp")
"""FSDP1 cuts units anywhere, so that parts of matrices are no multiples."""


@pytest.mark.parametrize("label", ["zero1", "zero3", "fsdp1"])
def test_trap_30_what_a_rank_updates_is_no_multiple_of_a_block(label: str, matrix) -> None:
    found = {f.id: f for f in matrix.findings([label], 2, [KIND, ODD])}
    wide = found.pop("low-bit-states-wide")
    assert wide.cell is not None
    assert wide.cell.label == label
    assert "bytes of optimizer states are in full width although optimizer.kind is adamw-8bit" in wide.text
    # What it names may be all that there is of quantised moments.
    assert set(found) <= {"master-dtype-differs"}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16-mixed", marks=pytest.mark.exhaustive)])
def test_every_strategy_trains_with_8_bit_states(precision: str, matrix) -> None:
    records = assert_parity(matrix, [KIND, EVEN, f"training.precision={precision}"], PARTS)
    for label, record in records.items():
        assert "uint8" in record.observed.optimizer_state_dtypes, label
        assert record.observed.wide_optimizer_bytes == 0, label
