"""Floating-point operations of a decoder in closed form, and utilisation of a device.

Model FLOPs per token: 6 N + 12 L H Q T (A. Chowdhery et al., 'PaLM', arXiv 2204.02311, appendix B), with N
parameters that multiply (embedding tables that are only looked up left out, norms and biases in), L layers,
H heads of size Q and T tokens per sequence. The attention term counts the whole square although a causal
kernel may skip half of it; forward and backward are one third and two thirds.
Hardware FLOPs add what is computed besides: padding, and the forward pass of the blocks once more under
activation checkpointing (V. Korthikanti et al., arXiv 2205.05198, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.theory.recomputation import recomputed_share


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What the closed forms need of a model."""

    multiplying_parameters: int
    block_parameters: int
    """Those of the transformer blocks, which recomputation runs again."""
    layers: int
    attention_width: int
    """Heads times head size, H Q."""
    sequence_length: int


def attention_flops_per_token(geometry: ModelGeometry) -> int:
    """12 L H Q T: scores and weighted values, forward and backward."""
    return 12 * geometry.layers * geometry.attention_width * geometry.sequence_length


def model_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 12 L H Q T."""
    return 6 * geometry.multiplying_parameters + attention_flops_per_token(geometry)


def hardware_flops_per_token(geometry: ModelGeometry, *, recomputation: bool | str) -> int:
    """Model FLOPs, and 2 N + 4 L H Q T once more of the blocks that recompute.

    recomputation: as `training.activation_checkpointing` has it.
    """
    again = 2 * geometry.block_parameters + attention_flops_per_token(geometry) // 3
    return model_flops_per_token(geometry) + int(again * recomputed_share(recomputation, geometry.layers))


def least_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 6 L H Q T: what even a kernel that skips the masked half of attention must do."""
    return 6 * geometry.multiplying_parameters + attention_flops_per_token(geometry) // 2
