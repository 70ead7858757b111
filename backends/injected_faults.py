"""Backends with an injected fault each; `harness doctor` must name every one. Never for use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend


class Spoiled(DdpBackend, ABC):
    """DDP whose engine is changed once it is set up."""

    @abstractmethod
    def spoil(self, engine: Any, context: SetupContext) -> None:
        """Inject the fault."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        self.spoil(engine, context)
        return engine


def scale_loss(engine: Any, factor: float) -> None:
    """Have an engine go back from this many times the loss that it is given."""
    original = engine.backward

    def backward(loss: Tensor, *, last_micro_step: bool) -> None:
        original(loss * factor, last_micro_step=last_micro_step)

    engine.backward = backward


class GradientsSummed(Spoiled):
    """Sums gradients over ranks where the contract says mean."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        scale_loss(engine, context.world.world_size)


class WrongBeta2(Spoiled):
    """Trains with an optimizer of its own, with another decay of the second moment."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        groups = [
            {key: group[key] for key in ("params", "weight_decay")} for group in engine.optimizer.param_groups
        ]
        engine.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))


class OutOfMemory(DdpBackend):
    """Asks for more memory than any machine has."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        torch.empty(2**60, dtype=torch.uint8, device=context.world.device)
        return super().prepare(build_model, build_optimizer, context)


class OutOfMemoryLater(Spoiled):
    """The last rank asks for more memory than any machine has in its second step, while the others wait."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, world, taken = engine.step, context.world, 0

        def step(lr: float) -> float:
            nonlocal taken
            taken += 1
            if taken == 2 and world.rank == world.world_size - 1:
                torch.empty(2**60, dtype=torch.uint8, device=world.device)
            return float(original(lr))

        engine.step = step


class StaleWeights(Spoiled):
    """The last rank forgets every update."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
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


class DividedAgain(Spoiled):
    """Divides by the accumulation steps although the loss is that of the whole batch; shows on one rank."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        scale_loss(engine, 1 / context.accumulation_steps)


class LeftOut(DdpBackend):
    """Gives the optimizer all parameters but the last; shows on one rank."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, lambda named: build_optimizer(list(named)[:-1]), context)
