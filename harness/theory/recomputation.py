"""Where the recomputation of a block's activations stops, by architecture of transformers 5."""

from __future__ import annotations

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
