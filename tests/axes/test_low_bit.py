"""AdamW with 8-bit moments under each strategy: states to the byte, full width where torchao falls back."""

from importlib.util import find_spec

import pytest

from tests.representatives import first

from .parity import assert_parity

pytestmark = pytest.mark.long(seconds=10)
KIND, BNB = "optimizer.kind=adamw-8bit", "optimizer.kind=adamw-8bit-bnb"
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra low-bit is not installed")
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="the extra qlora is not installed"
)
MODEL = (
    "model.config={hidden_size: %d, intermediate_size: %d, num_hidden_layers: %d, num_attention_heads: 2, "
)
MODEL += "num_key_value_heads: 2, max_position_embeddings: 16, vocab_size: 320}"
EVEN = MODEL % (96, 128, 2)
"""Halves of its groups and of its matrices are multiples of 256 elements and above 4,096."""
ODD = MODEL % (64, 132, 1)
"""Every matrix is a multiple of 256 elements, half of all of them is not."""
UNEVEN = MODEL % (96, 100, 4)
"""Halves of all matrices are a multiple of 256 elements, one matrix is not."""
FEW, FEW_BNB = ("zero3", "fsdp"), ("zero3",)
PARTS, PARTS_BNB = ("ddp", "zero1", "zero3", "fsdp"), ("ddp", "zero0", "zero1", "zero2", "zero3")
"""FSDP1 cuts units anywhere, so that parts of matrices are no multiples."""
CUT = MODEL % (64, 100, 1)
"""FSDP1's halves have 1,472 of the 6,400 elements of a matrix on the first rank."""


@needs_torchao
@pytest.mark.parametrize("label", first(["fsdp1"], ["zero1", "zero3", "fsdp1", "fsdp-cp", "tp"]))
def test_trap_30_what_a_rank_updates_is_no_multiple_of_a_block(label: str, matrix) -> None:
    found = {f.id: f for f in matrix.findings([label], 2, [KIND, ODD])}
    wide = found.pop("low-bit-states-wide")
    assert wide.cell is not None
    assert wide.cell.label == label
    assert "bytes of optimizer states are in full width although optimizer.kind is adamw-8bit" in wide.text
    # What it names may be all that there is of quantised moments.
    assert set(found) <= {"master-dtype-differs"}


@needs_torchao
def test_parameters_that_end_within_a_block_are_refused_where_deepspeed_cuts_moments(matrix) -> None:
    record = matrix.record("zero1", 2, [KIND, UNEVEN])
    assert record.status == "unsupported"
    assert "a parameter ends within one" in record.reasons[0]


@needs_torchao
@pytest.mark.parametrize(
    ("precision", "labels"), first([("fp32", FEW)], [("fp32", FEW), ("fp32", PARTS), ("bf16-mixed", PARTS)])
)
def test_every_strategy_trains_with_8_bit_states(precision: str, labels: tuple[str, ...], matrix) -> None:
    records = assert_parity(matrix, [KIND, EVEN, f"training.precision={precision}"], labels)
    for label, record in records.items():
        assert "uint8" in record.observed.optimizer_state_dtypes, label
        assert record.observed.wide_optimizer_bytes == 0, label


@needs_bitsandbytes
def test_trap_30_a_part_is_too_small_for_bitsandbytes(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["fsdp1"], 2, [BNB, CUT])}
    wide = found.pop("low-bit-states-wide")
    assert wide.values["wide_optimizer_bytes"] == 2 * 4 * 1472
    assert "adamw-8bit-bnb: what a rank updates is below 4,096 elements" in wide.text
    assert not found


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("precision", "labels"),
    first([("fp32", FEW_BNB)], [("fp32", FEW_BNB), ("fp32", PARTS_BNB), ("bf16-mixed", PARTS_BNB)]),
)
@pytest.mark.costly
def test_bitsandbytes_trains_with_8_bit_states(precision: str, labels: tuple[str, ...], matrix) -> None:
    records = assert_parity(matrix, [BNB, EVEN, f"training.precision={precision}"], labels)
    for label, record in records.items():
        assert "uint8" in record.observed.optimizer_state_dtypes, label
        assert record.observed.wide_optimizer_bytes == 0, label


def test_bitsandbytes_takes_no_rows_of_fsdp2(matrix) -> None:
    record = matrix.record("fsdp", 2, [BNB, EVEN])
    assert record.status == "unsupported"
    assert "take no DTensor" in record.reasons[0]
