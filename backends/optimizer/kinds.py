"""What is said of optimizers besides their names. Importable without torch."""

from __future__ import annotations

from typing import Literal

OF_TORCH = ("adamw", "adam", "sgd")
"""Kinds that torch has, in three implementations each."""
LOW_BIT = ("adamw-8bit", "adamw-8bit-bnb")
"""Kinds that keep moments in 8 bits."""
LEAST_ELEMENTS = 4096
BLOCK_ELEMENTS = 256
"""torchao 0.18, `optim/adam.py`, `_AdamBase._new_buffer`: smaller tensors, and those whose elements are no
multiple of a block, keep moments in the parameters' dtype, without a word. bitsandbytes 0.50,
`optim/optimizer.py`, `Optimizer2State.init_state`: smaller ones keep fp32; its last block may be shorter."""
NewtonSchulz = Literal["fp32", "bf16"]
"""Precision in which Muon orthogonalises."""


def is_quantised(elements: int, kind: str) -> bool:
    """Whether the moments of a tensor of so many elements are kept in 8 bits."""
    in_blocks = kind == "adamw-8bit-bnb" or elements % BLOCK_ELEMENTS == 0
    return elements >= LEAST_ELEMENTS and in_blocks
