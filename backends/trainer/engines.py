"""Engines whose forward, backward and update are steps of Trainer's own loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.backends.accelerate import AccelerateZeroEngine, forget_accelerator
from harness.backends.base import Batch
from harness.backends.ddp import DdpEngine
from harness.backends.fsdp.fsdp1 import Fsdp1Engine
from harness.backends.optimizer.groups import set_rates
from harness.backends.torch_engine import TorchEngine
from harness.backends.trainer.alone import LIBRARY_ALONE, alone
from harness.backends.trainer.held import HeldTrainer

from ..fsdp.fsdp2 import Fsdp2Engine


class TrainerTorchEngine(TorchEngine):
    """What Trainer does with an optimizer of torch's own: clipping, unscaling and update are its."""

    own_thread = True
    trainer: HeldTrainer

    def forward(self, batch: Batch) -> Tensor:
        # Trainer's `evaluate` is another loop; the wrapped model is the same.
        return self.trainer.forward(batch) if torch.is_grad_enabled() else super().forward(batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self.trainer.backward(loss)
        self._micro_steps = 0 if last_micro_step else self._micro_steps + 1

    def step(self, lr: float) -> float:
        set_rates(self.optimizer, lr)
        return self.trainer.step()

    def close(self) -> None:
        self.trainer.close()
        forget_accelerator()


class TrainerDdpEngine(TrainerTorchEngine, DdpEngine):
    """DDP as Trainer has Accelerate prepare it."""


class TrainerFsdp2Engine(TrainerTorchEngine, Fsdp2Engine):
    """fully_shard as Trainer has Accelerate prepare it."""


class TrainerFsdp1Engine(TrainerTorchEngine, Fsdp1Engine):
    """FSDP1 as Trainer has Accelerate prepare it."""


class TrainerZeroEngine(AccelerateZeroEngine):
    """DeepSpeed as Trainer has Accelerate prepare it."""

    own_thread = True

    def __init__(self, trainer: HeldTrainer, *args: Any) -> None:
        super().__init__(trainer.accelerator, *args)
        self.trainer = trainer
        # Accelerate 1.15 steps the optimizer at the end of backward, within Trainer's `training_step`.
        trainer.hold_before(self.engine, "step")

    def forward(self, batch: Batch) -> Tensor:
        return self.trainer.forward(batch) if torch.is_grad_enabled() else super().forward(batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self.trainer.backward(loss)

    def step(self, lr: float) -> float:
        set_rates(self.engine.optimizer, lr)
        norm = self.trainer.step()
        overflowed = getattr(self.engine.optimizer, "overflow", False)
        return float("inf") if overflowed else norm

    def close(self) -> None:
        self.trainer.close()
        super().close()

    def _details(self, zero: Any) -> dict[str, Any]:
        return super()._details(zero) | details_of(self.trainer)


def details_of(trainer: HeldTrainer) -> dict[str, Any]:
    """What Trainer would do alone, and what it is given instead, read from the live one."""
    return {
        LIBRARY_ALONE: alone(trainer),
        "scheduler": type(trainer.lr_scheduler).__name__,
        "distributed_type": str(trainer.accelerator.distributed_type.value),
    }
