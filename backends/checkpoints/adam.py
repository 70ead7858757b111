"""Adam's states, their checksum and the loss scaler: made and continued. DeepSpeed's are in `zero_pieces`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.backends.base import Engine
from harness.backends.optimizer.gradients import real_numbers
from harness.backends.piece import MOMENTS, OptimizerProgress, Piece


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
    state |= {
        "scale": scale,
        "_growth_tracker": clean_steps % scaler.get_growth_interval(),
    }
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
    """Of a 1-D tensor whose first element is number `start` of what the piece is a range of."""
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
