"""Products in fp8, emulated, under each strategy: within the band that they span, states as in fp32."""

from importlib.util import find_spec

import pytest

from .parity import NATIVE, assert_parity

pytestmark = [
    pytest.mark.long(seconds=40),
    pytest.mark.skipif(find_spec("torchao") is None, reason="the extra low-bit is not installed"),
]
FP8 = "training.precision=fp8"


def test_sharded_strategies_train_in_fp8(matrix) -> None:
    records = assert_parity(matrix, [FP8], ["zero3", "fsdp"])
    assert all(record.observed.wide_linears == 0 for record in records.values())


def test_layers_that_fell_back_are_named(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["planted-WideProducts"], 2, [FP8])}
    assert "14 linear layers of the blocks do not multiply in fp8" in found["fp8-not-applied"].text
    assert set(found) <= {"fp8-not-applied", "diverged", "gradient-differs", "update-differs"}


def test_tensor_parallelism_is_unsupported_by_reason(matrix) -> None:
    record = matrix.record("tp:tensor=2", 2, [FP8])
    assert record.status == "unsupported"
    assert "parts of rows" in record.reasons[0]


@pytest.mark.exhaustive
def test_every_native_strategy_trains_in_fp8(matrix) -> None:
    assert_parity(matrix, [FP8], [*NATIVE, "zero0", "zero2", "fsdp-grad-op", "accelerate-ddp"])
