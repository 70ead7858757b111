"""Engines with a defect each, which the contract must reject."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from harness.backends.base import (
    BackendOptions,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
    World,
)
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend, synchronise
from harness.backends.injected_faults import GradientsSummed as GradientsSummed
from harness.backends.injected_faults import Spoiled, scale_loss


class LossScaledTwice(Spoiled):
    """Divides by the accumulation steps although the loop has normalised already; here always by 2."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        scale_loss(engine, 1 / 2)


class NoClipping(DdpBackend):
    """Ignores the clipping that the job asks for."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, build_optimizer, replace(context, gradient_clipping=None))


class LastMicroStepOnly(Spoiled):
    """Drops the gradients of every micro-step but the last."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, last_micro_step: original(
            loss * float(last_micro_step), last_micro_step=last_micro_step
        )


class EveryMicroStep(Spoiled):
    """Synchronises gradients in every micro-step; the gradients come out right all the same."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.strategy = replace(engine.strategy, skip_synchronisation=nullcontext)


class CompressedReduction(Spoiled):
    """Reduces gradients in bf16 where the weights are fp32."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        import torch.distributed as dist

        def compress(group, bucket):
            low = bucket.buffer().bfloat16().div_(dist.get_world_size())
            work = dist.all_reduce(low, async_op=True).get_future()
            return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))

        engine.module.register_comm_hook(None, compress)


class LibraryDefaultReduction(Fsdp2Backend):
    """Reduces in the compute dtype although the preset says fp32."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, build_optimizer, replace(context, preset="library-defaults"))


class WideReduction(Fsdp2Backend):
    """Reduces in fp32 although the job asks for the library's default, which is the compute dtype."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, build_optimizer, replace(context, preset="like-for-like"))


class Hybrid(Fsdp2Backend):
    """What `fsdp-hybrid` runs."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, sharding="hybrid")


class ReplicasApart(Hybrid):
    """Hybrid sharding that never reduces across replicas."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)

        def within_shards(last: bool) -> None:
            synchronise(engine.module, last)
            engine.module.set_requires_all_reduce(False)

        engine.strategy = replace(engine.strategy, set_synchronisation=within_shards)
        return engine


class OtherReplicas(Hybrid):
    """Hybrid sharding whose second row of ranks is turned round: each rank reduces with another replica."""

    def _mesh(self, world: World) -> DeviceMesh:
        return DeviceMesh(world.device, [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard"))
