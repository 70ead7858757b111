"""Context parallelism: each sample is divided among ranks whose attention meets in a ring."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from harness.backends.base import (
    BackendOptions,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
)
from harness.backends.ddp import DdpBackend, DdpEngine
from harness.backends.fsdp2 import Fsdp2Backend
from harness.backends.fsdp2_engine import Fsdp2Engine
from harness.backends.options import ContextParallelOptions, FsdpContextParallelOptions, Rotation
from harness.backends.ring_attention import RingAttention, require_ring_attention
from harness.backends.torch_engine import TorchEngine


class RingEngine(TorchEngine):
    """Adds up what ranks that share samples compute of them, where the library averages over all ranks."""

    ring: RingAttention

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        shared = self.context.world.mesh.size("sequence")
        super().backward(loss * shared, last_micro_step=last_micro_step)

    def close(self) -> None:
        self.ring.close()
        super().close()

    def join_ring(self, rotation: Rotation) -> None:
        """Let attention meet from here on. Raises Unsupported where it would stay within each rank's part."""
        require_ring_attention(self._bare_module())
        world = self.context.world
        sizes = dict(world.mesh.sizes)
        mesh = init_device_mesh(world.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        details = {"sequence": sizes["sequence"], "rotation": rotation}
        self.strategy = replace(
            self.strategy,
            name=f"context_parallel with {self.strategy.name}",
            native_config=self.strategy.native_config | {"context_parallel": details},
            details=self.strategy.details | details,
        )
        self.ring = RingAttention(mesh["sequence"], rotation)


class RingDdpEngine(RingEngine, DdpEngine):
    """DDP whose ranks divide samples."""


class RingFsdp2Engine(RingEngine, Fsdp2Engine):
    """FSDP2 whose ranks divide samples."""


class ContextParallelBackend(DdpBackend):
    """`context_parallel` within groups of neighbours, DDP over all ranks."""

    Options: ClassVar[type[BackendOptions]] = ContextParallelOptions

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        assert isinstance(self.options, ContextParallelOptions)
        engine = super().prepare(build_model, build_optimizer, context)
        assert isinstance(engine, RingEngine)
        engine.join_ring(self.options.rotation)
        return engine

    def _engine_class(self) -> type[DdpEngine]:
        return RingDdpEngine


class FsdpContextParallelBackend(Fsdp2Backend):
    """`context_parallel` within groups of neighbours, FSDP2 over all ranks."""

    Options: ClassVar[type[BackendOptions]] = FsdpContextParallelOptions

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        assert isinstance(self.options, FsdpContextParallelOptions)
        engine = super().prepare(build_model, build_optimizer, context)
        assert isinstance(engine, RingEngine)
        engine.join_ring(self.options.rotation)
        return engine

    def _engine_class(self) -> type[Fsdp2Engine]:
        return RingFsdp2Engine
