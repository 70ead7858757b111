"""Backends with a defect of memory each, which a comparison must name."""

from __future__ import annotations

import torch

from backends import fsdp2
from backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from backends.ddp import DdpBackend
from backends.fsdp2 import Fsdp2Backend

LEAKED_BYTES = 40_000
HOARDED_BYTES = 4_000_000


class OneUnit(Fsdp2Backend):
    """Wraps the root only: no policy reaches the blocks."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        original = fsdp2.transformer_blocks
        fsdp2.transformer_blocks = lambda _: {}
        try:
            return super().prepare(build_model, build_optimizer, context)
        finally:
            fsdp2.transformer_blocks = original


class Leaking(DdpBackend):
    """Keeps a tensor of every step."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        original, kept = engine.step, []

        def step(lr: float) -> float:
            kept.append(torch.zeros(LEAKED_BYTES // 4))
            return original(lr)

        engine.step = step  # type: ignore[method-assign]
        return engine


class Hoarding(DdpBackend):
    """Its last rank holds what the others do not."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        if context.world.rank == context.world.world_size - 1:
            engine.hoard = torch.zeros(HOARDED_BYTES // 4)  # type: ignore[attr-defined]
        return engine
