"""The loss scale of DeepSpeed in fp16."""

from __future__ import annotations

from typing import Any


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
