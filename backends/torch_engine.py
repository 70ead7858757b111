"""The engine of every strategy whose optimizer is torch's own: single, DDP, FSDP 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.backends.base import Batch, Effective, Engine, SetupContext, TensorKind
from harness.backends.checkpoints.torch_pieces import (
    bare_optimizer,
    restore_scaler,
    scaler_progress,
    set_update_count,
    update_count,
    whole_pieces,
)
from harness.backends.model.blocks import first_trained, frozen_dtype
from harness.backends.model.precision import autocast_dtype, dtype_name
from harness.backends.model_source import Loading
from harness.backends.optimizer import groups
from harness.backends.optimizer.gradients import clip, fp32_norm, global_norm, local_shard
from harness.backends.piece import OptimizerProgress, Piece


@dataclass(frozen=True, kw_only=True)
class TorchStrategy:
    """What distinguishes one torch strategy from another, as far as the engine is concerned."""

    name: str
    native_config: dict[str, Any]
    wrap_units: list[str]
    reduce_dtype: torch.dtype | None
    parameter_count: int
    compute_dtype: torch.dtype
    autocast: bool
    offload: list[str]
    details: dict[str, Any]
    requested_name: str | None = None
    """What the library was asked for, where it may have chosen otherwise."""
    gather_dtype: torch.dtype | None = None
    reduce_bucket_bytes: int | None = None
    prefetch: str | None = None
    library_autocast: torch.dtype | None = None
    """Autocast that the library itself puts around the forward pass."""
    loading: Loading = "full"
    norm_group: dist.ProcessGroup | None = None
    """Ranks that hold disjoint parts of the gradient; None: every rank holds all of it."""
    norm_copies: Callable[[Tensor], int] | None = None
    """How many ranks of `norm_group` hold the same part of a gradient as this one; None: no other does."""
    fp32_norm: bool = False
    """Whether the norm is added in fp32 by tensor."""
    skip_synchronisation: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of a micro-step that is not the last."""
    set_synchronisation: Callable[[bool], None] | None = None
    """Alternative to the context: called with whether this micro-step is the last."""
    reduces_each: bool = False
    """Whether gradients are reduced in every micro-step, so that neither of these is used."""
    gathers_anew: bool = False
    """Whether what `named_full_parameters` yields belongs to nobody else."""
    named_full_parameters: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """Gathers full parameters; None: they are not sharded."""


class TorchEngine(Engine):
    """Forward under autocast, backward with gradient synchronisation deferred, exact clipping, AdamW."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        context: SetupContext,
        strategy: TorchStrategy,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.context = context
        self.strategy = strategy
        self.scaler = scaler
        self._micro_steps = 0
        self._micro_step_stack = ExitStack()
        if context.compile == "model":
            module.compile()

    def forward(self, batch: Batch) -> Tensor:
        if torch.is_grad_enabled():
            last = self._micro_steps == self.context.accumulation_steps - 1
            # DDP and FSDP1 decide in the forward pass whether the backward pass will reduce.
            each = self.strategy.reduces_each
            if not (last or each):
                self._micro_step_stack.enter_context(self.strategy.skip_synchronisation())
            if self.strategy.set_synchronisation is not None and not each:
                self.strategy.set_synchronisation(last)
        with self._autocast():
            return self.context.compute_loss(self.module, batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        with self._micro_step_stack:
            self._run_backward(loss)
        self._micro_steps = 0 if last_micro_step else self._micro_steps + 1

    def step(self, lr: float) -> float:
        groups.set_rates(self.optimizer, lr)
        self._unscale()
        gradients = self._gradients()
        norm = (
            fp32_norm(gradients)
            if self.strategy.fp32_norm
            else global_norm(self._counted_gradients(), self.strategy.norm_group, self.strategy.norm_copies)
        )
        clip(gradients, norm, self.context.gradient_clipping)
        self._update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        gather = self.strategy.named_full_parameters
        named = gather() if gather else self._bare_module().named_parameters()
        for name, tensor in named:
            # A copy: a numpy view of a live FSDP1 parameter would keep its storage from being freed.
            copies = not self.strategy.gathers_anew
            tensor = tensor.detach().to(device="cpu", dtype=_wide(tensor), copy=copies)
            yield name, tensor
            del tensor  # before the next one is gathered

    def full_gradients(self) -> Iterator[tuple[str, Tensor]] | None:
        if self.scaler is not None:
            return None  # scaled until the step
        return self._unsharded_gradients()

    def _unsharded_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._bare_module().named_parameters():
            if parameter.grad is not None:
                # Offloaded shards lie on the CPU while NCCL gathers device memory only.
                yield name, full_tensor(parameter.grad.to(self.context.world.device))

    def effective(self) -> Effective:
        parameter = first_trained(self.module)
        frozen = frozen_dtype(self.module)
        # Accelerate wraps the one that trains; those of an observed script are several in one.
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        trained = next(groups.updated_tensors(self.optimizer), parameter)
        reduce_dtype = self.strategy.reduce_dtype
        gathered = self.strategy.gather_dtype
        # Shards of gradients add up in the dtype of the weights that the optimizer updates.
        whole = gathered is not None and not self.strategy.reduces_each
        autocast = self.strategy.library_autocast
        if self.strategy.autocast:
            autocast = autocast_dtype(self.context.precision)
        return Effective(
            strategy=self.strategy.name,
            wrap_units=self.strategy.wrap_units,
            parameter_dtype=dtype_name(self.strategy.compute_dtype),
            autocast_dtype=dtype_name(autocast) if autocast else None,
            master_dtype=dtype_name(trained.dtype),
            gradient_dtype=dtype_name(parameter.dtype),
            reduce_dtype=dtype_name(reduce_dtype) if reduce_dtype else None,
            optimizer=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            optimizer_groups=groups.describe_groups(self.optimizer),
            gradient_clipping=self.context.gradient_clipping,
            accumulation_steps=self.context.accumulation_steps,
            gradient_synchronisation="every micro-step" if self.strategy.reduces_each else "last micro-step",
            loss_scale=float(self.scaler.get_scale()) if self.scaler else None,
            offload=self.strategy.offload,
            parameter_count=self.strategy.parameter_count,
            requested_strategy=self.strategy.requested_name,
            gather_dtype=dtype_name(gathered) if gathered else None,
            accumulation_dtype=dtype_name(reduce_dtype if whole and reduce_dtype else parameter.dtype),
            reduce_bucket_bytes=self.strategy.reduce_bucket_bytes,
            prefetch=self.strategy.prefetch,
            optimizer_implementation=groups.optimizer_implementation(optimizer, [trained]),
            loading=self.strategy.loading,
            frozen_dtype=dtype_name(frozen) if frozen else None,
            details=self.strategy.details,
        )

    def native_config(self) -> dict[str, Any]:
        return self.strategy.native_config

    def save(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, checkpoint_id=directory)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])

    def native_format(self) -> str:
        return "torch.distributed.checkpoint"

    def pieces(self) -> Iterator[Piece]:
        return whole_pieces(self._bare_module().named_parameters(), self.optimizer)

    def weight_pieces(self) -> Iterator[Piece]:
        return whole_pieces(self._bare_module().named_parameters(), None)

    def progress(self) -> OptimizerProgress:
        scale = scaler_progress(self.scaler) if self.scaler else {}
        return OptimizerProgress(updates=update_count(bare_optimizer(self.optimizer)), **scale)

    def continue_from(self, progress: OptimizerProgress) -> None:
        set_update_count(bare_optimizer(self.optimizer), progress.updates)
        if self.scaler:
            restore_scaler(self.scaler, progress)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        for _, held in groups.held_tensors(self.optimizer.state.values()):
            yield "optimizer", held
        for parameter in self.module.parameters():
            yield "weights", local_shard(parameter.detach())
            if parameter.grad is not None:
                yield "gradients", local_shard(parameter.grad)
        for buffer in self.module.buffers():
            yield "buffers", buffer

    def gathered_tensors(self) -> Iterator[Tensor]:
        # Each module of a probed step asks: with thousands a walk over all tensors takes minutes.
        whole = type(self).state_tensors is TorchEngine.state_tensors
        return iter(()) if whole else super().gathered_tensors()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if self.scaler:
            state["scaler"] = self.scaler.state_dict()
        return state

    def _run_backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def _unscale(self) -> None:
        if self.scaler:
            self.scaler.unscale_(self.optimizer)

    def _update(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = autocast_dtype(self.context.precision) if self.strategy.autocast else None
        return torch.autocast(self.context.world.device, dtype) if dtype else nullcontext()

    def _gradients(self) -> list[Tensor]:
        return [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _counted_gradients(self) -> list[Tensor]:
        """What this rank adds to the norm: the ranks of `norm_group` count each gradient once."""
        return self._gradients()

    def _bare_module(self) -> nn.Module:
        wrapped = getattr(self.module, "module", None)
        return wrapped if isinstance(wrapped, nn.Module) else self.module


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor gathered, any other tensor as it is; fp32 on the CPU, a complex one complex64.

    A collective for DTensors.
    """
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather else tensor).detach().to(device="cpu", dtype=_wide(tensor), copy=True)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex64 if tensor.is_complex() else torch.float32
