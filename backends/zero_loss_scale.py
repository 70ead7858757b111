"""What DeepSpeed does otherwise in low precision: its loss scale, and the first step of stage 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_scale(engine: Any) -> float | None:
    """The one in force; None outside of fp16."""
    if not engine.fp16_enabled():
        return None
    return float(getattr(engine.optimizer, "cur_scale", engine.optimizer.loss_scale))


def forgotten_loss_scale(engine: Any) -> float:
    """Of stage 0: what it divides gradients by without having scaled the loss; 1 outside of fp16.

    `DeepSpeedEngine.backward` (DeepSpeed 0.19) scales for optimizers of ZeRO alone, although
    `FP16_UnfusedOptimizer.step` unscales. Library defaults keep it so: the gradient norm shows it.
    """
    return loss_scale(engine) or 1.0


def forget_dummy_step(optimizer: torch.optim.Optimizer) -> None:
    """Set Adam's step count back to zero.

    `FP16_UnfusedOptimizer.initialize_optimizer_states` (DeepSpeed 0.19) steps once on zero gradients,
    so that training would begin at t = 2 with moments of zero: the first updates come out wrong.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
