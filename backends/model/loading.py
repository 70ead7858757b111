"""Fills the shards of a model whose skeleton was sharded, so that no rank ever holds all of its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.backends.base import BackendOptions, World
from harness.backends.model_source import ModelSource
from harness.backends.options import shard_size


def this_device(world: World) -> torch.device:
    """The device of a rank: the current one, which `take_device` chose."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if world.device == "cuda" else torch.device("cpu")
    )


def hybrid_mesh(world: World, options: BackendOptions) -> DeviceMesh:
    """Shard groups of neighbours, and the groups of their replicas."""
    size = shard_size(world, getattr(options, "shard_size", None))
    shape = (world.world_size // size, size)
    return init_device_mesh(world.device, shape, mesh_dim_names=("replicate", "shard"))


def reserve_parameters(skeleton: nn.Module) -> None:
    """Give each parameter memory on the CPU that is reserved and not written, so not resident.

    A library that shards parameter by parameter or unit by unit then makes one of them resident at a time.
    """
    on_meta = list(skeleton.parameters())  # kept, so that their ids stay theirs
    reserved = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
        )
        for parameter in on_meta
    }
    for module in skeleton.modules():
        for name, parameter in _own_parameters(module):
            module._parameters[name] = reserved[id(parameter)]


def fill_sharded(model: nn.Module, source: ModelSource, device: torch.device) -> None:
    """Give each parameter of a skeleton, a DTensor, its local part, on `device`."""
    on_meta = list(model.named_parameters())
    rows = {}
    for name, parameter in on_meta:
        # At full width: those of a matrix that is cut by columns too are narrowed once they are filled.
        shape, offset = _part_of(parameter)
        width = tuple(parameter.shape[1:])
        own = torch.empty((*shape[:1], *width), dtype=parameter.dtype, device=device)
        source.fill(own.view(-1), name, offset[0] * math.prod(width) if own.numel() else 0)
        rows[id(parameter)] = own
    source.filled()
    local = {}
    for _, parameter in on_meta:
        shape, offset = _part_of(parameter)
        part = rows.pop(id(parameter))
        for dimension in range(1, len(shape)):
            part = part.narrow(dimension, offset[dimension], shape[dimension])
        assert isinstance(parameter, DTensor)
        # `DTensor.from_local` would move an offloaded part to the device of the mesh.
        sharded = _from_local_no_grad(part.contiguous(), parameter._spec)
        local[id(parameter)] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in _own_parameters(module):
            # FSDP2 takes over what is assigned in this way, or a padded copy of it where ranks have different
            # numbers of rows (torch 2.13, `FSDPParam.reset_sharded_param`).
            module.load_state_dict({name: local[id(parameter)]}, strict=False, assign=True)


def _part_of(parameter: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first element of this rank's part of a DTensor."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return compute_local_shape_and_global_offset(parameter.shape, mesh, placements)


def fill_fsdp1(fsdp: FullyShardedDataParallel, source: ModelSource) -> None:
    """Fill the flat shard of each unit; its metadata say which elements of which parameter lie where."""
    for unit_name, unit in fsdp.named_modules():
        flat = unit._flat_param if isinstance(unit, FullyShardedDataParallel) else None
        if flat is None:
            continue
        prefix = f"{unit_name}.".replace("_fsdp_wrapped_module.", "") if unit_name else ""
        shard: Tensor = flat.data  # `_local_shard` from the first forward pass on
        for name, part in zip(flat._fqns, flat._shard_param_infos, strict=True):
            start, elements = part.offset_in_shard or 0, part.numel_in_shard or 0
            with torch.no_grad():
                source.fill(shard[start : start + elements], prefix + name, part.intra_param_start_idx or 0)
    source.filled()


def fill_zero3(model: nn.Module, source: ModelSource) -> None:
    """Fill the pieces into which `deepspeed.zero.Init` cut each flattened parameter, one per rank."""
    for name, parameter in model.named_parameters():
        partitioned: Any = parameter
        piece: Tensor = partitioned.ds_tensor
        start = dist.get_rank() * piece.numel()
        elements = max(0, min(piece.numel(), partitioned.ds_numel - start))
        piece[elements:].zero_()
        source.fill(piece[:elements], name, start)
    source.filled()


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))
