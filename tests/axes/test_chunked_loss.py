"""Cross entropy of some tokens at a time, under each strategy."""

import pytest

from .parity import CHUNK, LARGE, NATIVE, assert_parity, together

TOKENS, VOCABULARY = 8 * 16, 4096


def forward_peak(record) -> int:
    return max(
        row.peak_bytes - row.allocated_bytes
        for row in record.ranks[0].memory
        if row.moment == "after_backward"
    )


def test_where_the_head_is_gathered_the_loss_stays_and_logits_are_gone(matrix) -> None:
    records = assert_parity(matrix, together(), ["zero3", "fsdp"])
    (whole,) = matrix.compare([], 2, together()[:-1]).rows
    losses = [step.loss for step in records["single"].steps]
    assert losses == pytest.approx([step.loss for step in whole.record.steps], rel=1e-5)
    saved = forward_peak(whole.record) - forward_peak(records["single"])
    # At least the logits in fp32 and their gradient, of all tokens but those of a chunk.
    assert saved >= 2 * 4 * VOCABULARY * (TOKENS - CHUNK)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_strategy_trains_with_it(tied: str, precision: str, matrix) -> None:
    settings = [f"loss.chunk_tokens={CHUNK}", LARGE % tied, f"training.precision={precision}"]
    assert_parity(matrix, settings, [*NATIVE, "accelerate-ddp"])
