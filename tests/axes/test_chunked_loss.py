"""Cross entropy of some tokens at a time, under each strategy."""

import pytest

from .parity import NATIVE, assert_parity

LARGE = "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
LARGE += "num_key_value_heads: 2, max_position_embeddings: 16, vocab_size: 4096, tie_word_embeddings: %s}"
CHUNK, TOKENS, VOCABULARY = 8, 8 * 16, 4096
SETTINGS = [f"loss.chunk_tokens={CHUNK}", LARGE % "false"]


def forward_peak(record) -> int:
    return max(
        row.peak_bytes - row.allocated_bytes
        for row in record.ranks[0].memory
        if row.moment == "after_backward"
    )


@pytest.mark.long(seconds=15)
def test_where_the_head_is_gathered_the_loss_stays_and_logits_are_gone(matrix) -> None:
    records = assert_parity(matrix, SETTINGS, ["zero3", "fsdp"])
    (whole,) = matrix.compare([], 2, [LARGE % "false"]).rows
    losses = [step.loss for step in records["single"].steps]
    assert losses == pytest.approx([step.loss for step in whole.record.steps], rel=1e-5)
    saved = forward_peak(whole.record) - forward_peak(records["single"])
    # At least the logits in fp32 and their gradient, of all tokens but those of a chunk.
    assert saved >= 2 * 4 * VOCABULARY * (TOKENS - CHUNK)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_strategy_trains_with_it(tied: str, precision: str, matrix) -> None:
    settings = [SETTINGS[0], LARGE % tied, f"training.precision={precision}"]
    assert_parity(matrix, settings, [*NATIVE, "accelerate-ddp"])
