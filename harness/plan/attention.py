"""The attention kernel of a scenario, which decides memory and time alike, and the seconds that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from harness.job.model import ModelSection
from harness.plan.model import PlannedModel

EAGER_ONLY = frozenset({"BloomForCausalLM", "Gemma2ForCausalLM", "MptForCausalLM"})
"""Classes of transformers 5 that do not support sdpa (`_supports_sdpa`); a test compares."""
CAUSAL_TILE = 128
"""Rows and columns that a fused attention kernel takes at once: it skips whole tiles above the diagonal."""
ATTENTION_BACKWARD = 2.5
"""Products in the backward pass of fused attention over those in the forward pass: five to two."""
FUSED_FORMULA = "causal share of 4 T s a L, forward 1, backward 2.5"
EAGER_FORMULA = "4 T s a L / R, backward twice, + scores written and read / M"
EAGER_SOURCE = "eager attention of transformers 5, counted"

FP32_BYTES = 4
FULL_ACCESSES = (8, 9)
"""Reads and writes of a score in fp32, forward and backward. Forward: product 1, scaled 2, masked 2, softmax
2, product with the values 1. Backward: its gradient 1, read with the values' 1, softmax 3, scaled 2, two
products 2."""
LOW_ACCESSES = (8, 8)
"""The same in low precision: softmax's stand below, its input is widened and its output narrowed, 1 each."""
WIDE_BYTES = (16, 20)
"""Bytes of fp32 that softmax adds then: widened 4, softmax 4 + 4, narrowed 4; backward one more read of 4."""


def attention_kernel(model: PlannedModel, section: ModelSection) -> str:
    """'sdpa', 'eager' or 'flash_attention_2': what the job asks for, else what transformers chooses.

    Classes without a closed form here count as sdpa.
    """
    return section.attention_kernel or ("eager" if model.architecture in EAGER_ONLY else "sdpa")


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Seconds over all layers, with T the tokens of a micro-step and s the sequence."""

    fused: float = 0.0
    """Per T (s + half_length) of the causal share, forward; 0 for eager attention."""
    half_length: float
    eager_forward: float = 0.0
    """Per T s; 0 for a fused kernel."""
    eager_backward: float = 0.0

    def forward(self, tokens: int, sequence: int) -> float:
        return self._fused(tokens, sequence) + self.eager_forward * tokens * sequence

    def backward(self, tokens: int, sequence: int) -> float:
        return ATTENTION_BACKWARD * self._fused(tokens, sequence) + self.eager_backward * tokens * sequence

    def _fused(self, tokens: int, sequence: int) -> float:
        causal = min(1.0, (1 + CAUSAL_TILE / sequence) / 2)
        return self.fused * tokens * causal * (sequence + self.half_length)


def fused_attention(*, width: int, layers: int, flops: float, half_length: float) -> AttentionTime:
    """Of a kernel that keeps scores on the chip. `width`: heads times head size; `flops`: per second."""
    return AttentionTime(fused=4 * width * layers / flops, half_length=half_length)


def eager_attention(
    *, width: int, heads: int, layers: int, flops: float, bytes_per_second: float, element_bytes: int
) -> AttentionTime:
    """Of products, masks and softmax as operators of their own, which write all scores to memory."""
    products = 4 * width * layers / flops
    scores = heads * layers / bytes_per_second
    if element_bytes == FP32_BYTES:
        forward, backward = (count * element_bytes for count in FULL_ACCESSES)
    else:
        forward, backward = (
            count * element_bytes + wide for count, wide in zip(LOW_ACCESSES, WIDE_BYTES, strict=True)
        )
    return AttentionTime(
        half_length=0.0,
        eager_forward=products + scores * forward,
        eager_backward=2 * products + scores * backward,
    )
