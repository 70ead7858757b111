"""The engine around a DeepSpeed engine (0.19), where DeepSpeed keeps its tensors, and their pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import Batch, Effective, Engine, SetupContext, TensorKind, Unsupported
from ..checkpoints.torch_pieces import (
    flat,
    make_states,
    require_scale,
    set_update_count,
    update_count,
    whole_pieces,
)
from ..model.blocks import first_trained, frozen_dtype
from ..model.precision import dtype_name
from ..model_source import Loading
from ..optimizer.gradients import global_norm
from ..optimizer.groups import (
    describe_groups,
    held_tensors,
    optimizer_implementation,
    set_rates,
    tensors_in,
    updated_tensors,
)
from ..piece import MOMENTS, OptimizerProgress, Piece
from ..presets import HOOKED_WITHOUT_GATHER, TIMER_WAITS
from ..torch_engine import full_tensor

SECOND_PIECE = "ds_secondary_tensor"
"""Attribute of a parameter: this rank's piece of the copy that its group keeps (hpZ)."""
KEPT_BY_DEEPSPEED: dict[TensorKind, tuple[str, ...]] = {
    "weights": ("bit16_groups_flat", "fp16_partitioned_groups_flat", "bf16_groups_flat"),
    "masters": (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups",
    ),
    "gradients": (
        "averaged_gradients",
        "all_grad_tensors",
        "grad_partitions_flat_buffer",
        "accumulated_grads_in_cpu",
    ),
    "communication": (
        "temp_grad_buffer_for_cpu_offload",
        "temp_grad_buffer_for_gpu_offload",
        "param_buffer_of_bit16_for_cpu_offload_groups",
    ),
}


def forget_second_copies(model: nn.Module) -> None:
    """Have the first forward pass gather from all ranks, as later steps do.

    Partitioning makes the copy as it frees a weight (`Init._partition_param_sec`), also of one that was
    reserved without values or only shows its shape: the first step would gather that, not the weights.
    """
    for parameter in model.parameters():
        if getattr(parameter, SECOND_PIECE, None) is not None:
            setattr(parameter, SECOND_PIECE, None)


def loss_scale(engine: Any) -> float | None:
    """The one in force; None outside of fp16."""
    if not engine.fp16_enabled():
        return None
    return float(getattr(engine.optimizer, "cur_scale", engine.optimizer.loss_scale))


def forget_dummy_step(optimizer: torch.optim.Optimizer) -> None:
    """Set the optimizer's states back to zero, its step count too.

    `FP16_UnfusedOptimizer.initialize_optimizer_states` (DeepSpeed 0.19) steps once on zero gradients, so that
    Adam would begin at t = 2: the first updates come out wrong. Of Adam and SGD that add weight decay to
    gradients the moments would be those of the decay. bitsandbytes keeps the tables of its 8-bit codes among
    the states (`Optimizer2State.init_state`, 0.50): they stay.
    """
    tables = {id(table) for table in getattr(optimizer, "name2qmap", {}).values()}
    for state in optimizer.state.values():
        for key, value in state.items():
            if id(value) in tables:
                continue
            if isinstance(value, Tensor):
                value.zero_()
            elif key == "step":
                state[key] = 0


class ZeroEngine(Engine):
    """Drives `DeepSpeedEngine` so that it neither rescales the loss nor decides the boundaries."""

    def __init__(
        self,
        engine: Any,
        context: SetupContext,
        config: dict[str, Any],
        stage: int,
        parameter_count: int,
        loading: Loading = "full",
    ) -> None:
        self.engine = engine
        self.context = context
        self.config = config
        self.stage = stage
        self.parameter_count = parameter_count
        self.loading = loading
        forget_second_copies(engine.module)
        if context.compile == "model":
            engine.compile()

    def forward(self, batch: Batch) -> Tensor:
        return self.context.compute_loss(self.engine, batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last_micro_step)
        # `DeepSpeedEngine.backward` (DeepSpeed 0.19) scales the loss for optimizers of ZeRO alone, although
        # `FP16_UnfusedOptimizer.step` unscales. Library defaults keep it so: the gradient norm shows it.
        if self.stage == 0 and self.context.preset == "like-for-like":
            loss = loss * (loss_scale(self.engine) or 1.0)
        self.engine.backward(loss, scale_wrt_gas=False)
        if not last_micro_step:
            self.engine.step()  # between boundaries it only counts

    def step(self, lr: float) -> float:
        set_rates(self.engine.optimizer, lr)
        # Stage 0 in fp32 has a bare optimizer behind it and reports no norm.
        own_norm = hasattr(self.engine.optimizer, "_global_grad_norm")
        gradients = (p.grad for p in self.engine.module.parameters() if p.grad is not None)
        norm = 0.0 if own_norm else global_norm(gradients, None)
        # The optimizer of stage 0 in fp16 reports the norm of the gradients before unscaling.
        scale = (loss_scale(self.engine) or 1.0) if self.stage == 0 else 1.0
        self.engine.step()
        if own_norm:
            norm = float(self.engine.get_global_grad_norm()) / scale
            if getattr(self.engine.optimizer, "overflow", False):
                norm = float("inf")
        return norm

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        # Stage 0 in low precision keeps fp32 masters in lists parallel to the model's parameters.
        pairs = zero_masters(self.engine) if self.stage == 0 else ()
        masters = {id(parameter): master for parameter, master in pairs if master is not parameter}
        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter]):
                    full = parameter.detach().to(device="cpu", dtype=torch.float32, copy=True)
                yield name, full
                del full
                continue
            held = masters.get(id(parameter))
            # A tensor of its own.
            full = deepspeed.utils.safe_get_full_fp32_param(parameter) if held is None else None
            live = full is None
            full = (parameter if held is None else held) if full is None else full
            yield name, full.detach().to(device="cpu", dtype=torch.float32, copy=live)
            del full  # before the next one is gathered

    def full_gradients(self) -> Iterator[tuple[str, Tensor]] | None:
        return None if loss_scale(self.engine) is not None else self._unsharded_gradients()

    def _unsharded_gradients(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad if self.stage == 0 else safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, full_tensor(gradient)

    def effective(self) -> Effective:
        optimizer = self._basic_optimizer()
        # Stage 3 fills the groups of its optimizer only while it steps.
        parameter = first_trained(self.engine.module)
        flat = getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", None) or [parameter]
        trained = next(updated_tensors(optimizer), flat[0])
        frozen = frozen_dtype(self.engine.module)
        zero = self.engine._config.zero_config
        devices = {"optimizer": zero.offload_optimizer, "weights": zero.offload_param}
        offload = [kind for kind, setting in devices.items() if _device(setting) != "none"]
        return Effective(
            strategy=f"ZeRO stage {self.engine.zero_optimization_stage()}",
            wrap_units=self._gathered_modules() if self.stage == 3 else [""],
            parameter_dtype=dtype_name(parameter.dtype),
            autocast_dtype=None,
            master_dtype=dtype_name(trained.dtype),
            gradient_dtype=dtype_name(parameter.dtype),
            reduce_dtype=dtype_name(self.engine.communication_data_type),
            optimizer=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            optimizer_groups=describe_groups(optimizer),
            # What the optimizer clips by, which may change later; that of stage 0 has none of its own.
            gradient_clipping=getattr(self.engine.optimizer, "clip_grad", self.engine.gradient_clipping())
            or None,
            accumulation_steps=self.engine.gradient_accumulation_steps(),
            gradient_synchronisation=("every micro-step" if self.stage >= 2 else "last micro-step"),
            loss_scale=loss_scale(self.engine),
            offload=offload,
            parameter_count=self.parameter_count,
            gather_dtype=dtype_name(parameter.dtype) if self.stage > 0 else None,
            accumulation_dtype=dtype_name(self.engine.get_data_types()[1]),
            reduce_bucket_bytes=zero.reduce_bucket_size * parameter.element_size() if self.stage else None,
            prefetch=self._prefetch() if self.stage == 3 else None,
            optimizer_implementation=optimizer_implementation(optimizer, [trained]),
            loading=self.loading,
            frozen_dtype=dtype_name(frozen) if frozen else None,
            details=self._details(zero),
        )

    def _details(self, zero: Any) -> dict[str, Any]:
        timer = self.engine.tput_timer.config
        details = {
            # `ThroughputTimer` (DeepSpeed 0.19, utils/timer.py) waits as it starts and as it stops.
            TIMER_WAITS: bool(timer.enabled and timer.synchronized),
            "optimizer_wrapper": type(self.engine.optimizer).__name__,
            "reduce_bucket_elements": zero.reduce_bucket_size,
            "allgather_bucket_elements": zero.allgather_bucket_size,
            "overlap_comm": zero.overlap_comm,
            "contiguous_gradients": zero.contiguous_gradients,
            "parameter_persistence_elements": zero.param_persistence_threshold if self.stage == 3 else None,
        }
        if self.stage == 3:
            details["max_live_elements"] = zero.max_live_parameters
            details["max_reuse_elements"] = zero.max_reuse_distance
            details["memory_efficient_linear"] = zero.memory_efficient_linear
            if zero.zero_hpz_partition_size > 1:
                details["hpz"] = zero.zero_hpz_partition_size
        return details | ({HOOKED_WITHOUT_GATHER: True} if self.loading != "full" else {})

    def native_config(self) -> dict[str, Any]:
        return self.config

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory))

    def load(self, directory: Path) -> None:
        from deepspeed import __version__
        from deepspeed.runtime.zero.utils import ZeRORuntimeException

        try:
            path, _ = self.engine.load_checkpoint(str(directory))
        except ZeRORuntimeException as error:
            raise Unsupported(
                f"DeepSpeed {__version__}: {error} Save with measure.checkpoint=neutral: it has no such limit"
            ) from error
        if path is None:
            raise FileNotFoundError(f"no DeepSpeed checkpoint in {directory}")

    def native_format(self) -> str:
        return f"DeepSpeed ZeRO stage {self.stage}"

    def pieces(self) -> Iterator[Piece]:
        return self._pieces(moments=True)

    def weight_pieces(self) -> Iterator[Piece]:
        return self._pieces(moments=False)

    def _pieces(self, *, moments: bool) -> Iterator[Piece]:
        """Whole parameters at stage 0, partitions of flat groups above."""
        engine = self.engine
        if self.stage == 0:
            masters = {id(parameter): master for parameter, master in zero_masters(engine)}
            named = ((name, masters.get(id(p), p)) for name, p in engine.module.named_parameters())
            return whole_pieces(named, engine.basic_optimizer if moments else None)
        pieces = _scattered_pieces if self.stage == 3 else _partitioned_pieces
        return pieces(engine, MOMENTS if moments else ())

    def weights_in_use(self) -> Iterator[tuple[Tensor, Tensor]]:
        """DeepSpeed has two tensors in fp32 too."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            pairs = zero_masters(self.engine)
            yield from ((flat(master), flat(p)) for p, master in pairs if master is not p)
            return
        for parameter in self.engine.module.parameters():
            if not parameter.requires_grad:
                continue
            if self.stage == 3:
                own = _own_range(optimizer, parameter)
                if own.count:
                    masters = own.of(optimizer.fp32_partitioned_groups_flat[own.group])
                    # The gathered parameter while there is one, else this rank's partition.
                    is_whole = parameter.ds_status.name == "AVAILABLE"
                    in_use, start = (parameter, own.start) if is_whole else (parameter.ds_tensor, 0)
                    yield masters, flat(in_use).narrow(0, start, own.count)
            elif (mapping := parameter._hp_mapping) is not None:
                address = mapping.lp_fragment_address
                in_use = flat(parameter).narrow(0, address.start, address.numel)
                yield flat(mapping.get_hp_fragment()), in_use

    def progress(self) -> OptimizerProgress:
        updates = update_count(self.engine.basic_optimizer)
        if (scaler := _scaler_of(self.engine)) is None:
            return OptimizerProgress(updates=updates)
        clean = scaler.cur_iter - scaler.last_overflow_iter - 1
        return OptimizerProgress(updates=updates, loss_scale=float(scaler.cur_scale), clean_steps=clean)

    def continue_from(self, progress: OptimizerProgress) -> None:
        set_update_count(self.engine.basic_optimizer, progress.updates)
        if (scaler := _scaler_of(self.engine)) is not None:
            scaler.cur_scale, clean_steps = require_scale(progress)
            scaler.cur_iter = max(progress.updates, clean_steps)
            scaler.last_overflow_iter = scaler.cur_iter - 1 - clean_steps
        _refresh_weights(self.engine, self.stage)

    def train(self, mode: bool = True) -> None:
        self.engine.train(mode)

    def close(self) -> None:
        from deepspeed.utils import groups

        self.engine.destroy()
        # The next engine of this process has groups of its own: DeepSpeed refuses to make them twice.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        optimizer = self.engine.optimizer
        for _, held in held_tensors(self._basic_optimizer().state.values()):
            yield "optimizer", held
        for kind, names in KEPT_BY_DEEPSPEED.items():
            for name in names:
                for tensor in tensors_in(getattr(optimizer, name, None)):
                    yield kind, tensor
                    if tensor.grad is not None:
                        yield "gradients", tensor.grad
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            for tensor in tensors_in(bucket.buffer):
                yield "communication", tensor
        for parameter in self.engine.module.parameters():
            shard = getattr(parameter, "ds_tensor", None)
            if shard is not None:
                yield "weights", shard
                yield "gathered", parameter.data
            else:
                yield "weights", parameter.data
            for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
                if gradient is not None:
                    yield "gradients", gradient
            if (copy := getattr(parameter, SECOND_PIECE, None)) is not None:
                yield "weights", copy
        for buffer in self.engine.module.buffers():
            yield "buffers", buffer

    def _gathered_modules(self) -> list[str]:
        """Stage 3 gathers the parameters of each module that owns some; those of a leaf module at once."""
        from deepspeed.utils import z3_leaf_module

        found: list[str] = []
        leaves: list[str] = []
        for name, module in self.engine.module.named_modules():
            if any(name.startswith(f"{leaf}.") for leaf in leaves):
                continue
            if z3_leaf_module(module):
                leaves.append(name)
            if z3_leaf_module(module) or next(module.parameters(recurse=False), None) is not None:
                found.append(name)
        return found

    def _prefetch(self) -> str:
        """What stage 3 gathers ahead: `fetch_sub_module` (DeepSpeed 0.19) stops at the lesser of two limits.

        Nothing is gathered ahead if no parameter may be live besides those in use.
        """
        offload = self.engine.optimizer.parameter_offload
        ahead = min(offload._prefetch_bucket_sz, offload._max_available_parameters_in_numel)
        return f"{ahead} elements" if ahead else "none"

    def _basic_optimizer(self) -> torch.optim.Optimizer:
        return self.engine.basic_optimizer


def _device(setting: Any) -> str:
    """Device in one of DeepSpeed's settings of offload; 'none' without it."""
    return "none" if setting is None else str(getattr(setting.device, "value", setting.device))


def zero_masters(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with the tensor that the optimizer updates: another one in low precision."""
    low = getattr(engine.optimizer, "fp16_groups", None)
    high = getattr(engine.optimizer, "fp32_groups", None)
    if low is None or high is None:
        yield from ((parameter, parameter) for parameter in engine.module.parameters())
        return
    for low_group, high_group in zip(low, high, strict=True):
        yield from zip(low_group, high_group, strict=True)


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


def _scaler_of(engine: Any) -> Any | None:
    """What holds `cur_scale`, `cur_iter` and `last_overflow_iter`; None: nothing is scaled."""
    if not engine.fp16_enabled():
        return None
    held = "loss_scaler" if hasattr(engine.optimizer, "loss_scaler") else "loss_scale_config"  # stage 0
    return getattr(engine.optimizer, held)


def _partitioned_pieces(engine: Any, kept: Sequence[str]) -> Iterator[Piece]:
    """Stages 1 and 2: `_hp_mapping` says where a parameter meets this rank's partition of its group."""
    optimizer = engine.optimizer
    partitions = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if partitions is None:
        partitions = optimizer.fp32_groups_flat_partition  # BF16_Optimizer
    if kept:
        make_states(engine.basic_optimizer, partitions)
        # DeepSpeed 0.19 links states once, in the first step of the first group, when later groups have none.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            yield from whole_pieces([(name, parameter)], None)  # frozen: every rank has all of it
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


def _nothing_of(name: str, shape: tuple[int, ...], like: Tensor, kept: Sequence[str]) -> Piece:
    empty: torch.Tensor = like.detach().view(-1)[:0]
    return Piece(name=name, shape=shape, start=0, weight=empty, moments=dict.fromkeys(kept, empty))
