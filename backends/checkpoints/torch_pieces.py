"""Pieces of the torch strategies: whole parameters, DTensor shards of FSDP2, flat parameters of FSDP1."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.backends.base import Engine
from harness.backends.optimizer.gradients import real_numbers
from harness.backends.piece import MOMENTS, Columns, OptimizerProgress, Piece


def make_states(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
    """Give AdamW the states that its first step would make: moments of zero, and a step count each.

    Parameters that have states keep them. None: all parameters of its groups.
    """
    groups = optimizer.param_groups
    listed = [p for group in groups for p in group["params"]] if parameters is None else list(parameters)
    fused = any(group.get("fused") or group.get("capturable") for group in groups)
    for parameter in listed:
        state = optimizer.state[parameter]
        if "step" not in state and any("bias_correction" in group for group in groups):
            state["step"] = 0  # DeepSpeedCPUAdam counts in plain numbers
        elif "step" not in state:
            device = parameter.device if fused else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def update_count(optimizer: torch.optim.Optimizer) -> int:
    """The largest step count of the optimizer's states."""
    return int(max((float(s["step"]) for s in optimizer.state.values() if "step" in s), default=0))


def set_update_count(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Write the step count into every state that has one, in place."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(updates)
        elif "step" in state:
            state["step"] = updates


def flat(tensor: Tensor) -> Tensor:
    """A 1-D view; raises where only a copy could be had, since what is written must reach the engine."""
    return tensor.detach().view(-1)


def scaler_progress(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Fields of `Progress` of torch's loss scaler."""
    state = scaler.state_dict()
    return {"loss_scale": float(state["scale"]), "clean_steps": int(state["_growth_tracker"])}


def require_scale(progress: OptimizerProgress) -> tuple[float, int]:
    """The loss scale and the steps since it changed. Raises ValueError if the checkpoint has none."""
    if progress.loss_scale is None or progress.clean_steps is None:
        raise ValueError("the checkpoint has no loss scale, this run has a loss scaler")
    return progress.loss_scale, progress.clean_steps


def restore_scaler(scaler: torch.amp.GradScaler, progress: OptimizerProgress) -> None:
    """Continue torch's loss scaler. Raises ValueError if the checkpoint has no scale."""
    scale, clean_steps = require_scale(progress)
    state = scaler.state_dict()
    # DeepSpeed grows one step later than torch, so its count may equal the interval.
    state |= {"scale": scale, "_growth_tracker": clean_steps % scaler.get_growth_interval()}
    scaler.load_state_dict(state)


ELEMENTS_AT_ONCE = 2**20


def moments_checksum(engine: Engine) -> str:
    """16 hexadecimal digits; a collective. Raises Unsupported where the engine does not list its pieces.

    The sum, modulo 2^64, of the bits of every element as fp32, times an odd number that follows from its
    parameter and place: any one value that changed or moved changes it, and each rank adds its own part.
    """
    total = 0
    for piece in engine.pieces():
        first, last = piece.own_range()
        for moment in MOMENTS:
            if moment not in piece.moments:
                continue  # of a frozen parameter
            factor = zlib.crc32(f"{piece.name} {moment}".encode()) | 1
            own = piece.moments[moment][first:last]
            total += factor * _weighted_sum(own, piece, piece.start + first)
    totals: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(totals, total % 2**64)
    return f"{sum(totals) % 2**64:016x}"


def _weighted_sum(values: Tensor, piece: Piece, start: int) -> int:
    """Sum of the bits of a 1-D tensor times odd numbers of their places; `start`: the first element's."""
    if values.is_complex():
        values, start = real_numbers(values).reshape(-1), 2 * start
    total = 0
    for low in range(0, values.numel(), ELEMENTS_AT_ONCE):
        part = values[low : low + ELEMENTS_AT_ONCE]
        bits = part.float().view(torch.int32).to(torch.int64)
        places = torch.arange(start + low, start + low + part.numel(), device=part.device)
        if (held := piece.columns) is not None:
            row, column = places // held.count, places % held.count
            places = row * piece.shape[1] + held.first + column
        total += int(((bits + 1) * (places * 2 + 1)).sum())  # int64 wraps around
    return total


def whole_pieces(
    named: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None
) -> Iterator[Piece]:
    """Every rank holds every parameter. named: what the optimizer updates, by the parameter's name.

    Without an optimizer, here and below: weights alone.
    """
    optimizer = _with_states(optimizer)
    copies, copy = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for name, parameter in named:
        yield Piece(
            name=name,
            shape=tuple(parameter.shape),
            start=0,
            weight=flat(parameter),
            moments=_moments(optimizer, parameter),
            copies=copies,
            copy=copy,
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
    """FSDP1: each parameter is a range of its unit's flat one, which is cut.

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
            flat_parameter._params or [flat_parameter] * len(flat_parameter._fqns),
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
