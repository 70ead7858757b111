"""One process that computes with low-precision copies of fp32 weights, as ZeRO and FSDP do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import Batch, TensorKind
from harness.backends.piece import Progress
from harness.backends.precision import cast_parameters, compute_dtype
from harness.backends.torch_engine import TorchEngine


class CastEngine(TorchEngine):
    """The masters are the module's parameters; a copy of the module in the compute dtype runs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._low = copy.deepcopy(self.module)
        cast_parameters(self._low, compute_dtype(self.context.precision))
        # A copy of a module is not compiled.
        for low, master in zip(self._low.modules(), self.module.modules(), strict=True):
            if getattr(master, "_compiled_call_impl", None) is not None:
                low.compile()

    def forward(self, batch: Batch) -> Tensor:
        return self.context.compute_loss(self._low, batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self._run_backward(loss)
        for master, low in zip(self.module.parameters(), self._low.parameters(), strict=True):
            if low.grad is not None:
                gradient = low.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
                low.grad = None

    def step(self, lr: float) -> float:
        norm = super().step(lr)
        self._refresh()
        return norm

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._refresh()

    def continue_from(self, progress: Progress) -> None:
        super().continue_from(progress)
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            for master, low in zip(self.module.parameters(), self._low.parameters(), strict=True):
                low.copy_(master)

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        yield from super().state_tensors()
        for parameter in self._low.parameters():
            yield "gathered", parameter.detach()
        for buffer in self._low.buffers():
            yield "buffers", buffer

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        self._low.train(mode)
