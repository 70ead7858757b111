"""Backends with a defect of memory each, which a comparison must name."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp import fsdp2
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import Spoiled, instead
from harness.backends.model.blocks import transformer_blocks

LEAKED_BYTES = 40_000
HOARDED_BYTES = 4_000_000


class OneUnit(Fsdp2Backend):
    """Wraps the root only: no policy reaches the blocks."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        with patch.object(fsdp2, "transformer_blocks", lambda _: {}):
            return super().prepare(build_model, build_optimizer, context)


class OneUnitListed(Spoiled, OneUnit):
    """Wraps the root only, and lists every block as a unit all the same."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.strategy = replace(engine.strategy, wrap_units=[*transformer_blocks(engine.module), ""])


class Defect(Spoiled, DdpBackend):
    """DDP until `spoil` has had its way."""


class Leaking(Defect):
    """Keeps a tensor of every step."""

    every = 1
    begins = 0

    def spoil(self, engine: Any, context: SetupContext) -> None:
        kept, steps = [], count()

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            number = next(steps)
            if number >= self.begins and number % self.every == 0:
                kept.append(torch.zeros(LEAKED_BYTES // 4))
            return original(lr)


class LeakingEverySecondStep(Leaking):
    """Keeps a tensor of every second step."""

    every = 2


class LeakingLater(Leaking):
    """Keeps a tensor of each step from the eighth on."""

    begins = 7


class Spiking(Defect):
    """The update of the eighth step needs much memory on rank 1."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        steps = count()

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            if next(steps) == 7 and context.world.rank == 1:
                torch.zeros(HOARDED_BYTES // 4)
            return original(lr)


class Hiding(Defect):
    """Holds a copy of all weights in every step but the third and fourth, which are probed."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, steps = engine.step, count()

        def step(lr: float) -> float:
            hides = next(steps) in (2, 3)
            engine.copy = [] if hides else [p.detach().clone() for p in engine.module.parameters()]
            return original(lr)

        engine.step = step


class Hoarding(Defect):
    """Its last rank holds what the others do not."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == context.world.world_size - 1:
            engine.hoard = torch.zeros(HOARDED_BYTES // 4, device=context.world.device)
