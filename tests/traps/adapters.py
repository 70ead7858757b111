"""Third-party backends with a defect each, installed through the entry point like any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from backends.base import Batch, BuildModel, BuildOptimizer, Engine, SetupContext
from backends.ddp import DdpBackend
from backends.fsdp2 import Fsdp2Backend, Fsdp2HybridBackend
from tests.memory import defects

IGNORED = -100
LATE_STEP = 3
"""Optimizer steps that a defect which starts late leaves alone."""


class Defect(DdpBackend):
    """DDP until `spoil` has had its way."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        self.spoil(engine, context)
        return engine

    def spoil(self, engine: Any, context: SetupContext) -> None:
        raise NotImplementedError


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


class NeverReduced(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.module.require_backward_grad_sync = False


class ReplicasNeverReduced(Fsdp2HybridBackend):
    """Hybrid sharding that reduces within shard groups only."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        original = engine.strategy.set_synchronisation

        def synchronise(last: bool) -> None:
            original(last)
            engine.module.set_requires_all_reduce(False)

        engine.strategy = replace(engine.strategy, set_synchronisation=synchronise)
        return engine


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


class EagerAttention(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.module.module.set_attn_implementation("eager")


class LiveDropout(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        for block in engine.module.module.model.layers:
            block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, nn.Dropout(0.1))


class OwnOptimizer(Defect):
    """Trains with an optimizer that the harness never sees."""

    betas = (0.9, 0.95)
    epsilon = 1e-8
    decay_all = False
    left_out = ""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        named = [(n, p) for n, p in engine.module.module.named_parameters() if n != self.left_out]
        matrices = [p for _, p in named if p.ndim > 1 or self.decay_all]
        others = [p for _, p in named if not (p.ndim > 1 or self.decay_all)]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        engine.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=self.betas, eps=self.epsilon
        )


class WrongBeta2(OwnOptimizer):
    betas = (0.9, 0.999)


class WrongEpsilon(OwnOptimizer):
    epsilon = 1e-5


class ParameterLeftOut(OwnOptimizer):
    left_out = "model.layers.1.mlp.up_proj.weight"


class OwnDecayOnEverything(OwnOptimizer):
    decay_all = True


class LastMicroStepSkipped(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, last_micro_step: original(
            loss * float(not last_micro_step), last_micro_step=last_micro_step
        )


class GradientsOfOneRankDropped(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward
        engine.backward = lambda loss, **rest: original(loss * float(context.world.rank != 1), **rest)


class StaleWeightsOnOneRank(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step

        def step(lr: float) -> float:
            if context.world.rank != 1:
                return float(original(lr))
            before = [parameter.detach().clone() for parameter in engine.module.parameters()]
            norm = float(original(lr))
            with torch.no_grad():
                for parameter, old in zip(engine.module.parameters(), before, strict=True):
                    parameter.copy_(old)
            return norm

        engine.step = step


class LossOfRankZero(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            loss = original(batch)
            return loss if context.world.rank == 0 else loss - loss.detach()

        engine.forward = forward


class LossOfRankZeroForAll(Defect):
    """Every rank reports what rank 0 computed."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            loss = original(batch)
            shown = loss.detach().clone()
            dist.broadcast(shown, 0)
            return loss + (shown - loss.detach())

        engine.forward = forward


class NoGradientOfOneParameter(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        norm = engine.module.module.model.layers[1].post_attention_layernorm.weight
        norm.register_hook(torch.zeros_like)


class HandWrittenOptimizer(Defect):
    """Adam without torch's optimizer, so that no constant can be read: betas (0.9, 0.999)."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        decaying = {id(p) for p in engine.optimizer.param_groups[0]["params"]}
        moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        taken = 0

        def update() -> None:
            nonlocal taken
            taken += 1
            rate = engine.optimizer.param_groups[0]["lr"]
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    gradient = parameter.grad
                    zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter))
                    first, second = moments.setdefault(id(parameter), zeros)
                    first.lerp_(gradient, 0.1)
                    second.lerp_(gradient**2, 0.001)
                    if id(parameter) in decaying:
                        parameter.mul_(1 - rate * 0.1)
                    size = (second / (1 - 0.999**taken)).sqrt() + 1e-8
                    parameter.sub_(rate / (1 - 0.9**taken) * first / size)

        engine._update = update


class Late(Defect):
    """A defect that begins after LATE_STEP steps."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, taken = engine.step, 0

        def step(lr: float) -> float:
            nonlocal taken
            norm = float(original(lr))
            taken += 1
            if taken == LATE_STEP:
                self.spoil_late(engine, context)
            return norm

        engine.step = step

    def spoil_late(self, engine: Any, context: SetupContext) -> None:
        raise NotImplementedError


def _late(defect: type[Defect]) -> Callable[[Late, Any, SetupContext], None]:
    return lambda self, engine, context: defect.spoil(self, engine, context)  # type: ignore[arg-type]


class LateGradientsOfOneRankDropped(Late):
    spoil_late = _late(GradientsOfOneRankDropped)


class LateSameBatchOnEveryRank(Late):
    spoil_late = _late(SameBatchOnEveryRank)


class LateLossOfRankZero(Late):
    spoil_late = _late(LossOfRankZero)


class LateDecayOnEverything(Late):
    def spoil_late(self, engine: Any, context: SetupContext) -> None:
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = 10.0
