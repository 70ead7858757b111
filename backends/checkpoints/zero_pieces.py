"""Pieces of DeepSpeed's optimizers, and its loss scaler. DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.backends.checkpoints.torch_pieces import (
    flat,
    make_states,
    require_scale,
    set_update_count,
    update_count,
    whole_pieces,
)
from harness.backends.piece import MOMENTS, OptimizerProgress, Piece

from ..refusals import Unsupported


def zero_pieces(engine: Any, stage: int, *, moments: bool = True) -> Iterator[Piece]:
    """The pieces of a `DeepSpeedEngine`: whole parameters at stage 0, partitions of flat groups above."""
    if stage == 0:
        masters = {id(parameter): master for parameter, master in zero_masters(engine)}
        named = ((name, masters.get(id(p), p)) for name, p in engine.module.named_parameters())
        return whole_pieces(named, engine.basic_optimizer if moments else None)
    if stage == 3:
        return _scattered_pieces(engine, MOMENTS if moments else ())
    return _partitioned_pieces(engine, moments)


def load_native(engine: Any, directory: Path) -> None:
    """Load what `save_checkpoint` wrote; a collective. Raises Unsupported for another number of ranks."""
    from deepspeed import __version__
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    try:
        path, _ = engine.load_checkpoint(str(directory))
    except ZeRORuntimeException as error:
        raise Unsupported(
            f"DeepSpeed {__version__}: {error} Save with measure.checkpoint=neutral: it has no such limit"
        ) from error
    if path is None:
        raise FileNotFoundError(f"no DeepSpeed checkpoint in {directory}")


def zero_progress(engine: Any) -> OptimizerProgress:
    """What continues of a `DeepSpeedEngine` besides weights and moments."""
    updates = update_count(engine.basic_optimizer)
    scaler = _scaler_of(engine)
    if scaler is None:
        return OptimizerProgress(updates=updates)
    clean = scaler.cur_iter - scaler.last_overflow_iter - 1
    return OptimizerProgress(updates=updates, loss_scale=float(scaler.cur_scale), clean_steps=clean)


def continue_zero(engine: Any, stage: int, progress: OptimizerProgress) -> None:
    """Set the step count and the loss scaler, and make the weights in use anew; a collective.

    Raises ValueError if the checkpoint has no loss scale where this engine scales.
    """
    set_update_count(engine.basic_optimizer, progress.updates)
    if (scaler := _scaler_of(engine)) is not None:
        scaler.cur_scale, clean_steps = require_scale(progress)
        scaler.cur_iter = max(progress.updates, clean_steps)
        scaler.last_overflow_iter = scaler.cur_iter - 1 - clean_steps
    _refresh_weights(engine, stage)


def _scaler_of(engine: Any) -> Any | None:
    """What holds `cur_scale`, `cur_iter` and `last_overflow_iter`; None: nothing is scaled."""
    if not engine.fp16_enabled():
        return None
    return getattr(engine.optimizer, "loss_scaler", engine.optimizer)


def _refresh_weights(engine: Any, stage: int) -> None:
    """Copy master weights to the weights in use: nothing else does so before the end of the next step."""
    optimizer = engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # frees the parameters that stay gathered
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()  # gathers them again
    elif stage > 0:
        optimizer.update_lp_params()
    else:
        for parameter, master in zero_masters(engine):
            if master is not parameter:
                parameter.data.copy_(master.data)


def zero_masters(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with the tensor that the optimizer updates: another one in low precision."""
    low = getattr(engine.optimizer, "fp16_groups", None)
    high = getattr(engine.optimizer, "fp32_groups", None)
    if low is None or high is None:
        yield from ((parameter, parameter) for parameter in engine.module.parameters())
        return
    for low_group, high_group in zip(low, high, strict=True):
        yield from zip(low_group, high_group, strict=True)


def _partitioned_pieces(engine: Any, moments: bool) -> Iterator[Piece]:
    """Stages 1 and 2: `_hp_mapping` says where a parameter meets this rank's partition of its group."""
    optimizer = engine.optimizer
    partitions = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if partitions is None:
        partitions = optimizer.fp32_groups_flat_partition  # BF16_Optimizer
    if moments:
        make_states(engine.basic_optimizer, partitions)
        # DeepSpeed 0.19 links states once, in the first step of the first group, when later groups have none.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    kept = MOMENTS if moments else ()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            yield _frozen_piece(name, parameter)
            continue
        mapping = parameter._hp_mapping
        if mapping is None:
            yield _nothing_of(name, tuple(parameter.shape), partitions[0], kept)
            continue
        yield Piece(
            name=name,
            shape=tuple(parameter.shape),
            start=mapping.lp_fragment_address.start,
            weight=flat(mapping.get_hp_fragment()),
            moments={moment: flat(mapping.get_hp_fragment(moment)) for moment in kept},
        )


def zero_weights_in_use(engine: Any, stage: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's masters with the weights in use at their place: DeepSpeed has two tensors in fp32 too."""
    if stage == 0:
        yield from ((flat(master), flat(p)) for p, master in zero_masters(engine) if master is not p)
        return
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        if stage == 3:
            own = _own_range(engine.optimizer, parameter)
            if own.count:
                masters = own.of(engine.optimizer.fp32_partitioned_groups_flat[own.group])
                # The gathered parameter while there is one, else this rank's partition.
                is_whole = parameter.ds_status.name == "AVAILABLE"
                in_use, start = (parameter, own.start) if is_whole else (parameter.ds_tensor, 0)
                yield masters, flat(in_use).narrow(0, start, own.count)
        elif (mapping := parameter._hp_mapping) is not None:
            address = mapping.lp_fragment_address
            in_use = flat(parameter).narrow(0, address.start, address.numel)
            yield flat(mapping.get_hp_fragment()), in_use


@dataclass(frozen=True, kw_only=True)
class _OwnRange:
    """Of stage 3: what a rank updates of one parameter, without padding."""

    group: int
    """The optimizer's flat partition that it lies in."""
    offset: int
    """Its place there."""
    start: int
    """First element, of the flattened parameter."""
    count: int

    def of(self, partition: Tensor) -> Tensor:
        """The range, of a partition or of states of its shape."""
        return partition.detach().narrow(0, self.offset, self.count)


def _own_range(optimizer: Any, parameter: Any) -> _OwnRange:
    group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = padded * dist.get_rank(getattr(parameter, "ds_process_group", optimizer.dp_process_group))
    count = min(padded, max(0, parameter.ds_numel - start))
    return _OwnRange(group=group, offset=offset, start=start, count=count)


def _scattered_pieces(engine: Any, kept: Sequence[str]) -> Iterator[Piece]:
    """Stage 3: every parameter is cut into equal partitions, the last of which are padded.

    `kept`: names of moments.
    """
    optimizer = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        shape = tuple(parameter.ds_shape)
        if not parameter.requires_grad:
            held = parameter.ds_tensor.detach().view(-1)
            begin = held.numel() * dist.get_rank()
            own = min(held.numel(), max(0, parameter.ds_numel - begin))
            yield Piece(name=name, shape=shape, start=begin if own else 0, weight=held[:own], moments={})
            continue
        own = _own_range(optimizer, parameter)
        partition: Tensor = optimizer.fp32_partitioned_groups_flat[own.group]
        if kept:  # made, of zeros, where there are none
            make_states(engine.basic_optimizer, [partition])
        state = engine.basic_optimizer.state[partition] if kept else {}
        if not own.count:
            yield _nothing_of(name, shape, partition, kept)
            continue
        yield Piece(
            name=name,
            shape=shape,
            start=own.start,
            weight=own.of(partition),
            moments={moment: own.of(state[moment]) for moment in kept},
        )


def frozen_values(parameter: Any) -> Tensor:
    """A parameter that no optimizer updates, whole, fp32 on the CPU; a collective at stage 3."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().to(device="cpu", dtype=torch.float32, copy=True)  # type: ignore[no-any-return]


def _frozen_piece(name: str, parameter: Tensor) -> Piece:
    """Every rank holds a frozen parameter whole below stage 3."""
    return Piece(
        name=name, shape=tuple(parameter.shape), start=0, weight=flat(parameter), moments={},
        copies=dist.get_world_size(), copy=dist.get_rank(),
    )  # fmt: skip


def _nothing_of(name: str, shape: tuple[int, ...], like: Tensor, kept: Sequence[str]) -> Piece:
    empty: torch.Tensor = like.detach().view(-1)[:0]
    return Piece(name=name, shape=shape, start=0, weight=empty, moments=dict.fromkeys(kept, empty))
