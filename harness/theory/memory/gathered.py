"""The most weights that a strategy holds gathered if it gathers one unit after the other."""

from __future__ import annotations

from math import prod

from harness.record import TensorPart
from harness.theory.memory.fsdp1 import ALIGNMENT_BYTES
from harness.theory.memory.terms import Setting, ceil_to, numel


def most_gathered_bytes(setting: Setting, width: int, blocks_at_once: int) -> int:
    """Root and the `blocks_at_once` largest blocks, at `width` bytes per element.

    The root is gathered as long as the model computes, and its blocks one after the other (torch 2.13,
    `distributed/fsdp/_fully_shard`, `_fsdp_state.py`, and FSDP1's `_runtime_utils.py`). An upper bound: each
    parameter has the larger of FSDP2's padding of its rows and FSDP1's alignment, each unit FSDP1's padding.
    """
    blocks, root = setting.blocks_and_root()
    sizes = sorted((_unit_bytes(block, setting.shards, width) for block in blocks), reverse=True)
    return _unit_bytes(root, setting.shards, width) + sum(sizes[:blocks_at_once])


def _unit_bytes(parameters: list[TensorPart], ranks: int, width: int) -> int:
    held = sum(_padded(parameter, ranks, width) for parameter in parameters)
    return (held + ranks) * width if parameters else 0


def _padded(parameter: TensorPart, ranks: int, width: int) -> int:
    """Elements."""
    rows = parameter.shape[0] if parameter.shape else 1
    by_rows = ceil_to(rows, ranks) * prod(parameter.shape[1:])
    return max(by_rows, ceil_to(numel(parameter), ALIGNMENT_BYTES // width))
