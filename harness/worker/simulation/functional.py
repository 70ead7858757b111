"""Functional collectives of fake tensors: torch has shapes for them alone, so that none would be counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def _all_reduce(tensor: Tensor, _: str, group: Any) -> Tensor:
    result = tensor.clone()
    dist.all_reduce(result, group=_group(group))
    return result


def _all_gather(tensor: Tensor, group_size: int, group: Any) -> Tensor:
    result = tensor.new_empty((tensor.shape[0] * group_size, *tensor.shape[1:]))
    dist.all_gather_into_tensor(result, tensor, group=_group(group))
    return result


def _reduce_scatter(tensor: Tensor, _: str, group_size: int, group: Any) -> Tensor:
    result = tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:]))
    dist.reduce_scatter_tensor(result, tensor, group=_group(group))
    return result


def _all_to_all(tensor: Tensor, output_sizes: list[int], input_sizes: list[int], group: Any) -> Tensor:
    result = tensor.new_empty((sum(output_sizes), *tensor.shape[1:]))
    dist.all_to_all_single(result, tensor, output_sizes, input_sizes, group=_group(group))
    return result


def _group(named: Any) -> dist.ProcessGroup:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(named) if isinstance(named, str) else named


_OPERATORS = torch.ops._c10d_functional
PERFORMED: dict[Any, Callable[..., Tensor]] = {
    _OPERATORS.all_reduce.default: _all_reduce,
    _OPERATORS.all_gather_into_tensor.default: _all_gather,
    _OPERATORS.reduce_scatter_tensor.default: _reduce_scatter,
    _OPERATORS.all_to_all_single.default: _all_to_all,
}
"""Operator -> the same by the collectives that its kernel calls (torch 2.13, `c10d/Functional.cpp`)."""
