"""Backends with an injected fault each; `harness doctor` must name every one. Never for use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import Backend, BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend


class Spoiled(Backend):
    """Changes the engine that its other base prepares."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)  # type: ignore[safe-super]
        self.spoil(engine, context)
        return engine

    @abstractmethod
    def spoil(self, engine: Any, context: SetupContext) -> None:
        """Inject the fault."""


def instead(engine: Any) -> Callable[[Callable[..., Any]], None]:
    """Decorates what an engine does instead of its method of that name, which is the first argument."""

    def replace(method: Callable[..., Any]) -> None:
        setattr(engine, method.__name__, partial(method, getattr(engine, method.__name__)))

    return replace


def scale_loss(engine: Any, factor: float) -> None:
    """Have an engine go back from this many times the loss that it is given."""

    @instead(engine)
    def backward(original: Callable[..., None], loss: Tensor, *, last_micro_step: bool) -> None:
        original(loss * factor, last_micro_step=last_micro_step)


class GradientsSummed(Spoiled, DdpBackend):
    """Sums gradients over ranks where the contract says mean."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        scale_loss(engine, context.world.world_size)


class WrongBeta2(Spoiled, DdpBackend):
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


class OutOfMemoryLater(Spoiled, DdpBackend):
    """The last rank asks for more memory than any machine has in its second step, while the others wait."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        world, taken = context.world, 0

        @instead(engine)
        def step(original: Callable[[float], float], lr: float) -> float:
            nonlocal taken
            taken += 1
            if taken == 2 and world.rank == world.world_size - 1:
                torch.empty(2**60, dtype=torch.uint8, device=world.device)
            return original(lr)


class StaleWeights(Spoiled, DdpBackend):
    """The last rank forgets every update."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def step(original: Callable[[float], float], lr: float) -> float:
            if context.world.rank < context.world.world_size - 1:
                return original(lr)
            kept = [parameter.detach().clone() for parameter in engine.module.parameters()]
            norm = original(lr)
            with torch.no_grad():
                for parameter, old in zip(engine.module.parameters(), kept, strict=True):
                    parameter.copy_(old)
            return norm


class DividedAgain(Spoiled, DdpBackend):
    """Divides by the accumulation steps although the loss is that of the whole batch; shows on one rank."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        scale_loss(engine, 1 / context.accumulation_steps)


class LeftOut(DdpBackend):
    """Gives the optimizer all parameters but the last; shows on one rank."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, lambda named: build_optimizer(list(named)[:-1]), context)
