"""Under every strategy a job with adapters is the reference's, and what it holds and moves is expected."""

from __future__ import annotations

import pytest

from tests.representatives import EXHAUSTIVE, first
from tests.traps.matrix import Matrix

pytestmark = pytest.mark.long(seconds=15)

LORA = (
    "adapter={kind: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj, up_proj]}",
    "optimizer.learning_rate=2e-2",
    "measure.traced_steps=0",
)
STRATEGIES = ("ddp", "zero0", "zero2", "zero3", "fsdp", "fsdp1", "fsdp1-no-shard", "accelerate-zero3")
FEW = ("zero2", "fsdp1")
ADAPTERS = 1664
"""Elements of all adapters: per block 2 x (4 x 32 + 32 x 4) + 4 x 32 + 48 x 4."""


@pytest.mark.parametrize("strategies", [FEW, pytest.param(STRATEGIES, marks=EXHAUSTIVE)], ids=["few", "all"])
def test_every_strategy_trains_the_same_adapters(strategies: tuple[str, ...], matrix: Matrix) -> None:
    comparison = matrix.compare(strategies, 2, LORA)
    found = matrix.findings(strategies, 2, LORA)
    assert {f.id for f in found} == {"frozen-weights-reduced"}
    assert {label for f in found for label in f.backends} == {"fsdp1", "fsdp1-no-shard"} & {*strategies}
    assert {row.judgement.parity for row in comparison.rows} <= {"exact", "tight"}
    assert len({row.record.initial_weights.digest for row in comparison.rows}) == 1
    losses = [step.loss for step in comparison.rows[0].record.steps]
    assert losses[0] - losses[-1] > 0.05  # adapters do learn


@pytest.mark.costly
def test_four_bit_weights_train_alike_under_every_strategy(matrix: Matrix) -> None:
    settings = (LORA[0].replace("}", ", base_dtype: nf4}"), *LORA[1:])
    comparison = matrix.compare(("zero3", "fsdp"), 2, settings)
    assert [(f.id, f.message) for f in matrix.findings(("zero3", "fsdp"), 2, settings)] == []
    assert {row.judgement.parity for row in comparison.rows} <= {"exact", "tight"}
    for row in comparison.rows:
        assert row.record.observed is not None
        assert "uint8" in row.record.observed.frozen_dtypes


@pytest.mark.parametrize("strategy", first(["zero2", "fsdp"], ["ddp", "zero2", "fsdp"]))
def test_only_adapters_are_reduced(strategy: str, matrix: Matrix) -> None:
    record = matrix.record(strategy, 2, LORA)
    reduced = {
        row.rank: row.payload_bytes
        for row in record.comm
        if row.phase == "backward" and row.op in ("all_reduce", "reduce_scatter")
    }
    assert reduced == dict.fromkeys((0, 1), 2 * 4 * ADAPTERS)  # two probed steps
