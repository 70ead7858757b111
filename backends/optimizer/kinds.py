"""What is said of optimizers besides their names. Importable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

from harness.backends.libraries.facts import installed_version

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


def why_not_narrowed(groups: Iterable[tuple[Sequence[int], int]]) -> str | None:
    """Why DeepSpeed's stages 1 and 2 cannot train with torchao's moments; None: they can.

    groups: of each group of the optimizer, the elements of its parameters in order and of a rank's partition.
    With its first step DeepSpeed narrows the moments of a partition to each parameter
    (`set_optim_state_fragment`, utils/tensor_fragment.py of DeepSpeed 0.19.8), which torchao does at borders
    of blocks only (`aten.slice`, optim/subclass_8bit.py of 0.18).
    """
    for parameters, partition in groups:
        if is_quantised(partition, "adamw-8bit") and any(
            end % BLOCK_ELEMENTS for end in accumulate(parameters)
        ):
            deepspeed = installed_version("deepspeed") or "0.19.8"
            return (
                f"DeepSpeed {deepspeed} narrows 8-bit moments to each parameter at stages "
                f"1 and 2, which torchao does in blocks of {BLOCK_ELEMENTS} elements only, and a parameter "
                "ends within one; use stage 3, optimizer.kind=adamw-8bit-bnb, or sizes that are multiples"
            )
    return None
