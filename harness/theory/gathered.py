"""The most weights that a strategy holds gathered if it gathers one unit after the other."""

from __future__ import annotations

from collections.abc import Sequence

from harness.theory.fsdp1 import ALIGNMENT_BYTES
from harness.theory.layout import Tensor, ceil_to
from harness.theory.workload import Workload


def most_gathered_bytes(workload: Workload, width: int, blocks_at_once: int) -> int:
    """Root and the `blocks_at_once` largest blocks, at `width` bytes per element.

    The root is gathered as long as the model computes, and its blocks one after the other (torch 2.13,
    `distributed/fsdp/_fully_shard`, `_fsdp_state.py`, and FSDP1's `_runtime_utils.py`). An upper bound: each
    parameter has the larger of FSDP2's padding of its rows and FSDP1's alignment, each unit FSDP1's padding.
    """
    sizes = {name: _unit_bytes(unit, workload.shards, width) for name, unit in workload.layout.units()}
    root = sizes.pop("", 0)
    return root + sum(sorted(sizes.values(), reverse=True)[:blocks_at_once])


def _unit_bytes(parameters: Sequence[Tensor], ranks: int, width: int) -> int:
    return (sum(_padded(parameter, ranks, width) for parameter in parameters) + ranks) * width


def _padded(parameter: Tensor, ranks: int, width: int) -> int:
    """Elements."""
    rows, row = parameter.rows
    return max(ceil_to(rows, ranks) * row, ceil_to(parameter.numel, ALIGNMENT_BYTES // width))
