"""Pieces of the torch strategies: whole parameters, DTensor shards of FSDP2, flat parameters of FSDP1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.backends.checkpoints.adam import flat, make_states
from harness.backends.piece import MOMENTS, Columns, Piece


def whole_pieces(
    named: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None
) -> Iterator[Piece]:
    """Every rank holds every parameter. named: what the optimizer updates, by the parameter's name.

    Without an optimizer, here and below: weights alone.
    """
    optimizer = _with_states(optimizer)
    for name, parameter in named:
        yield Piece(
            name=name,
            shape=tuple(parameter.shape),
            start=0,
            weight=flat(parameter),
            moments=_moments(optimizer, parameter),
            copies=dist.get_world_size(),
            copy=dist.get_rank(),
        )


def dtensor_pieces(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> Iterator[Piece]:
    """FSDP2 cuts the first dimension, so a rank's rows are one range; tensor parallelism cuts columns too.

    Ranks along dimensions of the mesh that replicate hold copies.
    """
    optimizer = _with_states(optimizer)
    for name, parameter in named:
        assert isinstance(parameter, DTensor)
        mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        local = local_values(parameter)
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        row = parameter.shape[1:].numel()
        columns = None
        if local.numel() and len(shape) == 2 and shape[1] < parameter.shape[1]:
            row = shape[1]
            columns = Columns(first=offset[1], count=row)
        copies, copy = 1, 0
        for place, size, placement in zip(coordinate, mesh.shape, parameter.placements, strict=True):
            if isinstance(placement, Replicate):
                copies, copy = copies * size, copy * size + place
        yield Piece(
            name=name,
            shape=tuple(parameter.shape),
            start=offset[0] * row if local.numel() else 0,
            columns=columns,
            weight=local,
            moments=_moments(optimizer, parameter),
            copies=copies,
            copy=copy,
        )


def _with_states(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    if optimizer is None:
        return None
    optimizer = bare_optimizer(optimizer)
    make_states(optimizer)
    return optimizer


def _moments(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's part of Adam's states; a frozen parameter has none."""
    if optimizer is None or parameter not in optimizer.state:
        return {}
    state = optimizer.state[parameter]
    return {moment: local_values(state[moment]) for moment in MOMENTS}


def local_values(tensor: Any) -> Tensor:
    """What this rank holds of a DTensor, 1-D and live."""
    return flat(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def flat_parameter_pieces(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Piece]:
    """FSDP1 with original parameters: each is a range of its unit's flat parameter, which is cut.

    torch 2.13 notes which part (`_shard_param_infos`); states of parameters outside of this rank's shard do
    not exist.
    """
    optimizer = None if optimizer is None else bare_optimizer(optimizer)
    for unit_name, unit in module.named_modules():
        flat_parameter: Any = unit._flat_param if isinstance(unit, FullyShardedDataParallel) else None
        if flat_parameter is None:
            continue
        prefix = f"{unit_name}.".replace("_fsdp_wrapped_module.", "") if unit_name else ""
        handle: Any = unit._handle
        group = unit.process_group if handle.uses_sharded_strategy else None
        copies, copy = _replicas(unit, group)
        shard = getattr(flat_parameter, "_local_shard", None)
        shard = flat_parameter.data if shard is None else shard
        described = zip(
            flat_parameter._fqns,
            flat_parameter._params,
            flat_parameter._shapes,
            flat_parameter._shard_param_infos,
            strict=True,
        )
        for name, parameter, shape, info in described:
            if info.in_shard:
                if optimizer is not None and parameter.requires_grad:
                    make_states(optimizer, [parameter])
                weight = shard.detach().view(-1).narrow(0, info.offset_in_shard, info.numel_in_shard)
                moments = _moments(optimizer, parameter)
            else:
                weight = shard.detach().view(-1)[:0]
                trained = optimizer is not None and parameter.requires_grad
                moments = dict.fromkeys(MOMENTS if trained else (), weight)
            yield Piece(
                name=prefix + name,
                shape=tuple(shape),
                start=info.intra_param_start_idx or 0,
                weight=weight,
                moments=moments,
                copies=copies,
                copy=copy,
            )


def _replicas(unit: Any, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """How many ranks hold a unit's shard, and which of them this one is."""
    if group is None:
        return dist.get_world_size(), dist.get_rank()
    copies = dist.get_world_size() // group.size()
    replicas = getattr(unit, "_inter_node_pg", None)
    return copies, dist.get_rank(replicas) if replicas is not None else 0


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of Accelerate's, or itself."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, torch.optim.Optimizer)
    return inner
