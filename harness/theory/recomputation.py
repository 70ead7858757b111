"""Which blocks recompute their activations, and where that stops, by architecture of transformers 5."""

from __future__ import annotations

from fractions import Fraction

SELECTIVE = "selective"
EVERY = "every-"
PARTIAL_CHECKPOINTING = rf"^({SELECTIVE}|{EVERY}([2-9]|[1-9][0-9]{{1,3}}))$"
"""Values of `training.activation_checkpointing` that are neither true nor false."""

RECOMPUTED_UNTIL = {
    "BloomForCausalLM": "mlp.dense_4h_to_h",
    "GPT2LMHeadModel": "mlp.c_proj",
    "LlamaForCausalLM": "mlp.down_proj",
    "MistralForCausalLM": "mlp.down_proj",
    "Qwen2ForCausalLM": "mlp.down_proj",
}
"""Class of the model -> the last module of a block that saves a tensor for its backward pass, where
`torch.utils.checkpoint` stops early. After it these blocks only add the residual, which saves nothing."""


def recomputed_until(architecture: str | None) -> str | None:
    """Name of that module within its block; None for an architecture that was not looked up."""
    return RECOMPUTED_UNTIL.get(architecture or "")


def blocks_between(checkpointing: bool | str) -> int | None:
    """N where every N-th block recomputes all of its activations, from the first on; None: no block does."""
    if isinstance(checkpointing, str):
        return int(checkpointing.removeprefix(EVERY)) if checkpointing.startswith(EVERY) else None
    return 1 if checkpointing else None


def recomputed_share(checkpointing: bool | str, layers: int) -> Fraction:
    """Share of the blocks' matrix products and attention that the backward pass computes once more.

    Selective checkpointing keeps the outputs of both. `every-N` recomputes blocks 0, N, 2 N, ...
    (`_set_gradient_checkpointing`, transformers 5.23, modeling_utils.py).
    """
    between = blocks_between(checkpointing)
    return Fraction(-(-layers // between), layers) if between and layers else Fraction(0)
