"""The global gradient norm, accumulated in fp64, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

DOT_ELEMENTS = 2**16
COUNTED_ELSEWHERE = "counted_elsewhere"
"""Attribute of a parameter that another rank holds too, which counts its gradient."""
COUNTED_RANGES = "counted_ranges"
"""Attribute of a flat parameter of which another rank holds and counts a part: (start, end) of the rest."""


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """What lies in this rank's memory of a tensor: of a quantised one codes, scales and table."""
    local = local_shard(tensor)
    flatten = getattr(local, "__tensor_flatten__", None)
    return [getattr(local, name) for name in flatten()[0]] if flatten is not None else [local]


def global_norm(
    gradients: Iterable[Tensor],
    group: dist.ProcessGroup | None,
    copies: Callable[[Tensor], int] | None = None,
) -> float:
    """L2 norm of the gradient whose parts the ranks of `group` hold; None: all of it is here.

    copies: how many ranks of the group hold the same part as this one; None: parts are disjoint.

    In fp32 the CPU kernel of `torch.linalg.vector_norm` loses up to 1e-4 of the norm, which clipping
    then turns into loss differences between strategies that split differently.
    """
    alike: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(1 if copies is None else copies(gradient), []).append(local_shard(gradient))
    # Each rank adds its share of what several of them hold.
    parts = [_squares(shards) / count for count, shards in sorted(alike.items())]
    total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
    if group is not None:
        total = total.to(_communication_device(group, total.device))
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


def _squares(shards: Sequence[Tensor]) -> Tensor:
    squares = [_sum_of_squares(shard) for shard in shards if shard.device.type == "cpu"]
    squares += _sums_of_squares([shard for shard in shards if shard.device.type != "cpu"])
    return torch.stack(squares).sum()


def fp32_norm(gradients: Sequence[Tensor]) -> float:
    """Norm of gradients in fp32 throughout, by tensor, as `torch.nn.utils.clip_grad_norm_` adds it."""
    norms = [torch.linalg.vector_norm(real_numbers(gradient), dtype=torch.float32) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def real_numbers(tensor: Tensor) -> Tensor:
    """View a complex tensor as real and imaginary parts, in a last dimension of 2; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum of squares of a CPU tensor, an fp64 scalar within 1e-7 of exact; fp32 without a copy of the tensor.

    On the CPU an fp64 `vector_norm` takes ten times as long as fp32 dot products of short pieces, which
    lose next to nothing.
    """
    tensor = real_numbers(tensor)
    if tensor.dtype == torch.float32:
        pieces = tensor.reshape(-1).split(DOT_ELEMENTS)
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum(dtype=torch.float64)
    return torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2


def _sums_of_squares(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Sums of squares of an accelerator's tensors: fp64 scalars, one per call, without a copy of a tensor.

    `vector_norm(dtype=float64)` casts its input first: 8 bytes per element. `_foreach_norm` adds up in fp64
    as it reads, if the tensors of a call have one dtype (torch 2.13, ATen/native/cuda/ForeachReduceOp.cu).
    It allocates as many partial sums for each tensor as for the largest: calls take tensors of similar size.
    """
    calls: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for tensor in map(real_numbers, tensors):
        calls.setdefault((tensor.dtype, tensor.numel().bit_length()), []).append(tensor)
    norms = [torch._foreach_norm(alike, 2, dtype=torch.float64) for alike in calls.values()]
    return [torch.stack(of_call).square().sum() for of_call in norms]


def clip(gradients: Sequence[Tensor], norm: float, largest_norm: float | None) -> None:
    """Scale `gradients` in place so that their global norm is at most `largest_norm`.

    The formula is that of `torch.nn.utils.clip_grad_norm_`: largest_norm / (norm + 1e-6), at most 1.
    """
    if largest_norm is None:
        return
    coefficient = largest_norm / (norm + 1e-6)
    if coefficient < 1.0 and gradients:
        torch._foreach_mul_([local_shard(gradient) for gradient in gradients], coefficient)


def _communication_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Offloaded gradients lie on the CPU while NCCL moves device memory only."""
    if dist.get_backend(group) == "nccl" and device.type == "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return device
