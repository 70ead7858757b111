"""torch's strategies as they were measured; `wrap.py` has what belongs to one of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from wrap import clip, grad_scaler, synchronise, wrap

BuildModel = Callable[[], nn.Module]
BuildOptimizer = Callable[[Any], torch.optim.AdamW]


class Strategy:
    """Wraps the model; call `begin_step`, then each `micro_step` with `backward` in it, then `step`."""

    def __init__(self, build_model: BuildModel, build_optimizer: BuildOptimizer, settings: Any) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        self.model = wrap(build_model(), self.device, settings)
        names = ((name.replace("_fsdp_wrapped_module.", "").removeprefix("module."), parameter)
                 for name, parameter in self.model.named_parameters())  # fmt: skip
        self.optimizer = build_optimizer(names)
        self.largest_norm = settings["gradient_clipping"] or float("inf")
        self.reduces_each = settings["strategy"]["sync_each_batch"]
        autocast = settings["strategy"].get("autocast")
        self.autocast_dtype = getattr(torch, autocast) if autocast else None
        self.scaler = grad_scaler(self.device, settings["loss_scale"]) if settings["loss_scale"] else None

    def begin_step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-step alone, or in each."""
        dtype = self.autocast_dtype
        cast = torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext()
        with synchronise(self.model, last or self.reduces_each), cast:
            yield

    def backward(self, loss: Tensor) -> None:
        with torch.autocast(self.device.type, enabled=False):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> float:
        """Clip, update and zero; the gradient norm before clipping."""
        if self.scaler is None:
            norm = clip(self.model, self.largest_norm)
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            norm = clip(self.model, self.largest_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)
