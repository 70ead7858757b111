"""Quantised moments of DeepSpeed's flat partitions, which stages 1 and 2 cut parameter by parameter."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from harness.backends.base import Unsupported
from harness.backends.optimizer_kinds import BLOCK_ELEMENTS, is_quantised


def require_whole_blocks(optimizer: Any, kind: str, version: str) -> None:
    """Raise Unsupported, on all ranks alike, where a parameter ends within a block of torchao's.

    optimizer: DeepSpeed's of stage 1 or 2. With its first step it narrows the moments of a partition to
    each parameter (`set_optim_state_fragment`, utils/tensor_fragment.py of DeepSpeed 0.19.8), which torchao
    does at borders of blocks only (`aten.slice`, optim/subclass_8bit.py of 0.18).
    """
    if kind != "adamw-8bit":
        return
    for parameters, partition in zip(
        optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
    ):
        ends = accumulate(parameter.numel() for parameter in parameters)
        if is_quantised(partition.numel(), kind) and any(end % BLOCK_ELEMENTS for end in ends):
            raise Unsupported(
                f"DeepSpeed {version} narrows 8-bit moments to each parameter at stages 1 and 2, which "
                f"torchao does in blocks of {BLOCK_ELEMENTS} elements only, and a parameter ends within one; "
                "use stage 3, optimizer.kind=adamw-8bit-bnb, or sizes that are multiples"
            )
