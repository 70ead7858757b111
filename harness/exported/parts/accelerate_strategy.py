"""Accelerate as `accelerate launch --config_file accelerate.yaml` sets it up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from torch import Tensor, nn

BuildModel = Callable[[], nn.Module]
BuildOptimizer = Callable[[Any], torch.optim.AdamW]


class Strategy:
    """Prepares the model; call `begin_step`, then each `micro_step` with `backward` in it, then `step`."""

    def __init__(self, build_model: BuildModel, build_optimizer: BuildOptimizer, settings: Any) -> None:
        handlers: list[Any] = [DistributedDataParallelKwargs(**settings["strategy"].get("arguments", {}))]
        if settings["loss_scale"]:
            handlers.append(GradScalerKwargs(**settings["loss_scale"]))
        wanted = settings["strategy"]["distributed_type"]
        if wanted == "DEEPSPEED" and not torch.cuda.is_available():
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled at first
        self.reduces_each = settings["strategy"]["sync_each_batch"]
        plugin = {"gradient_accumulation_plugin": GradientAccumulationPlugin(sync_each_batch=True)}
        self.accelerator = Accelerator(
            cpu=wanted == "MULTI_CPU", kwargs_handlers=handlers, **(plugin if self.reduces_each else {})
        )
        if (found := self.accelerator.distributed_type.value) != wanted:
            if wanted == "FSDP" and not torch.cuda.is_available():
                raise SystemExit(f"Accelerate runs {found}, not FSDP: that it runs on GPUs only")
            raise SystemExit(f"Accelerate runs {found}, not {wanted}: give --config_file accelerate.yaml")
        self.is_deepspeed = self.accelerator.distributed_type is DistributedType.DEEPSPEED
        self.device = self.accelerator.device
        model = build_model()
        if not self.is_deepspeed:
            model.to(self.device)
        optimizer = build_optimizer(model.named_parameters())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.largest_norm = settings["gradient_clipping"]

    def begin_step(self, learning_rate: float) -> None:
        # DeepSpeed updates inside of the last `backward`, so the learning rate comes first.
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-step alone, or in each."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        if last or self.is_deepspeed or self.reduces_each:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.is_deepspeed else {}))

    def step(self) -> float:
        """Clip, update and zero; the gradient norm before clipping."""
        if self.is_deepspeed:
            norm = self.model.get_global_grad_norm()
            return float("nan") if norm is None else float(norm)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.largest_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)
