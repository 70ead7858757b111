"""What DeepSpeed (0.19) does with data of other ranks, and operators that communicate out of sight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from harness.worker.simulation.functional import PERFORMED

COMPARE = "assert_ints_same_as_other_ranks"
COMPARING = ("partition_parameters", "partitioned_param_coordinator", "stage3")
"""Modules of `deepspeed.runtime.zero` that compare what ranks recorded, in steps before the counted one."""


@contextmanager
def without_comparing_ranks() -> Iterator[None]:
    """Ranks that are not there recorded the same order of modules and parameters."""
    with ExitStack() as stack:
        for name in COMPARING:
            module = import_module(f"deepspeed.runtime.zero.{name}")
            stack.enter_context(patch.object(module, COMPARE, _agree))
        yield


@contextmanager
def exchanges_seen() -> Iterator[None]:
    """Ulysses exchanges within an operator of its own, of which tensors without data have the shape alone."""
    layer = import_module("deepspeed.sequence.layer")

    def exchange(tensor: Tensor, group_name: str) -> Tensor:
        result = torch.empty_like(tensor)
        dist.all_to_all_single(result, tensor, group=layer._all_to_all_groups[group_name])
        return result

    with patch.dict(PERFORMED, {torch.ops.deepspeed.dim_zero_all_to_all.default: exchange}):
        yield


def _agree(ints: Any) -> None:
    """All ranks have these numbers."""
