"""Backends with a defect each, to see what the harness makes of it; `harness doctor` does. Never for use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend


class GradientsSummed(DdpBackend):
    """Sums gradients over ranks where the contract says mean."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        original, size = engine.backward, context.world.world_size

        def backward(loss: Tensor, *, last_micro_step: bool) -> None:
            original(loss * size, last_micro_step=last_micro_step)

        engine.backward = backward  # type: ignore[method-assign]
        return engine


class WrongBeta2(DdpBackend):
    """Trains with an optimizer of its own, with another decay of the second moment."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        groups = [
            {key: group[key] for key in ("params", "weight_decay")} for group in engine.optimizer.param_groups
        ]
        engine.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
        return engine  # type: ignore[no-any-return]


class OutOfMemory(DdpBackend):
    """Asks for more memory than any machine has."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        torch.empty(2**60, dtype=torch.uint8, device=context.world.device)
        return super().prepare(build_model, build_optimizer, context)


class OutOfMemoryLater(DdpBackend):
    """The last rank asks for more memory than any machine has in its second step, while the others wait."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        original, world, taken = engine.step, context.world, 0

        def step(lr: float) -> float:
            nonlocal taken
            taken += 1
            if taken == 2 and world.rank == world.world_size - 1:
                torch.empty(2**60, dtype=torch.uint8, device=world.device)
            return float(original(lr))

        engine.step = step
        return engine  # type: ignore[no-any-return]


class StaleWeights(DdpBackend):
    """The last rank forgets every update."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        original = engine.step

        def step(lr: float) -> float:
            if context.world.rank < context.world.world_size - 1:
                return float(original(lr))
            kept = [parameter.detach().clone() for parameter in engine.module.parameters()]
            norm = float(original(lr))
            with torch.no_grad():
                for parameter, old in zip(engine.module.parameters(), kept, strict=True):
                    parameter.copy_(old)
            return norm

        engine.step = step
        return engine  # type: ignore[no-any-return]


class DividedAgain(DdpBackend):
    """Divides by the accumulation steps although the loss is that of the whole batch; shows on one rank."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        original, steps = engine.backward, context.accumulation_steps

        def backward(loss: Tensor, *, last_micro_step: bool) -> None:
            original(loss / steps, last_micro_step=last_micro_step)

        engine.backward = backward  # type: ignore[method-assign]
        return engine


class LeftOut(DdpBackend):
    """Gives the optimizer all parameters but the last; shows on one rank."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, lambda named: build_optimizer(list(named)[:-1]), context)
