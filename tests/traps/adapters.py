"""Third-party backends with a known trap each, installed through the entry point like any other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.backends.base import (
    BackendOptions,
    Batch,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
    World,
)
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.options import Fsdp2HybridOptions
from tests.memory import defects
from tests.memory.defects import Defect

IGNORED = -100


class Bf16Reduction(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        def reduce_in_bf16(_, bucket):
            low = bucket.buffer().to(torch.bfloat16) / context.world.world_size
            work = dist.all_reduce(low, async_op=True).get_future()
            return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))

        engine.module.register_comm_hook(None, reduce_in_bf16)


class GradientsSummed(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, **rest: original(loss * context.world.world_size, **rest)


class DividedTwice(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, **rest: original(loss / context.accumulation_steps, **rest)


class StepsAtEveryMicroBatch(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward

        def backward(loss: torch.Tensor, *, last_micro_step: bool) -> None:
            original(loss, last_micro_step=last_micro_step)
            if not last_micro_step:
                engine.optimizer.step()
                engine.optimizer.zero_grad()

        engine.backward = backward


class MeanPerRank(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            own = (batch["labels"][:, 1:] != IGNORED).sum().float()
            whole = own.clone()
            dist.all_reduce(whole)
            return original(batch) * float(whole / own / context.world.world_size)

        engine.forward = forward


class SameBatchOnEveryRank(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            shared = {key: value.clone() for key, value in batch.items()}
            for value in shared.values():
                dist.broadcast(value, 0)
            return original(shared)

        engine.forward = forward


class ShardedTwice(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, world = engine.forward, context.world
        engine.forward = lambda batch: original(
            {key: value[world.rank :: world.world_size] for key, value in batch.items()}
        )


class SeedPerRank(DdpBackend):
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            model = build_model()
            torch.manual_seed(1000 + context.world.rank)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)
            return model

        return super().prepare(build, build_optimizer, context)


class ScheduleOncePerProcess(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step
        engine.step = lambda lr: original(lr / context.world.world_size)


class Untied(DdpBackend):
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            model: Any = build_model()
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
            return model

        return super().prepare(build, build_optimizer, context)


class Frozen(DdpBackend):
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            model: Any = build_model()
            model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
            return model

        return super().prepare(build, build_optimizer, context)


class OneRate(Defect):
    """All groups of the optimizer get the job's rate."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        def level(optimizer: Any, *_: Any) -> None:
            first = optimizer.param_groups[0]
            for group in optimizer.param_groups:
                group["lr"] = first["lr"] / first.get("lr_scale", 1.0)

        engine.optimizer.register_step_pre_hook(level)


class NeverReduced(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.module.require_backward_grad_sync = False


class ReplicasNeverReduced(Fsdp2Backend):
    """Hybrid sharding whose mesh lacks the dimension of the replicas."""

    Options = Fsdp2HybridOptions

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, sharding="hybrid")

    def _mesh(self, world: World) -> DeviceMesh:
        return super()._mesh(world)["shard"]


class WholeModelInOneUnit(defects.OneUnit):
    pass


class HoardingRank(defects.Hoarding):
    pass


class NormOfTheShard(Fsdp2Backend):
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        engine.strategy = replace(engine.strategy, norm_group=None)
        return engine


class SynchronisedAtEveryMicroStep(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.strategy = replace(engine.strategy, skip_synchronisation=nullcontext)


class DecayOnEverything(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = 0.1


class SwappedDecayGroups(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        first, second = engine.optimizer.param_groups
        first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]


class LearningRateOfOneGroup(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        def halve(*_: Any) -> None:
            engine.optimizer.param_groups[1]["lr"] /= 2

        engine.optimizer.register_step_pre_hook(halve)


class OwnClipping(Defect):
    """Clips at another norm than it says."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine._update

        def update() -> None:
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.25)
            original()

        engine._update = update


class Checkpointed(DdpBackend):
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            model: Any = build_model()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return model

        return super().prepare(build, build_optimizer, context)


class Compiled(DdpBackend):
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            model = build_model()
            model.compile(backend="eager")
            return model

        return super().prepare(build, build_optimizer, context)


class Tf32(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True


class EagerAttention(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.module.module.set_attn_implementation("eager")


class LiveDropout(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        for block in engine.module.module.model.layers:
            block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, nn.Dropout(0.1))
