"""Third-party backends with a known trap each, installed through the entry point like any other: what spoils
an engine, and DDP spoiled in each way."""

import os
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.backends.base import (
    Backend,
    Batch,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
)
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import Spoiled, StaleWeights, instead, scale_loss
from tests.memory.defects import Defect

IGNORED = -100
SLEEP_SECONDS = "SLEEP_SECONDS"
"""Environment variable: how long."""
LATE_STEP = 3
"""Optimizer steps that are left alone before a late defect begins."""


def after_each_step(engine: Any, change: Callable[[int], object]) -> None:
    """change: given the number of updates so far."""
    taken = count(1)

    @instead(engine)
    def step(original: Any, lr: float) -> float:
        norm = float(original(lr))
        with torch.no_grad():
            change(next(taken))
        return norm


Spoil = Callable[[Any, Any, SetupContext], None]


def spoiled(spoil: Spoil, *families: type[Backend]) -> list[Any]:
    """A backend of each family with this defect."""
    return [
        type("Planted", (Spoiled, family), {"spoil": spoil, "__module__": spoil.__module__})
        for family in families
    ]


def late(spoil: Spoil, *families: type[Backend]) -> list[Any]:
    """A backend of each family whose defect begins after LATE_STEP steps."""

    def spoil_late(self: Any, engine: Any, context: SetupContext) -> None:
        after_each_step(engine, lambda taken: taken == LATE_STEP and spoil(self, engine, context))

    spoil_late.__module__ = spoil.__module__
    return spoiled(spoil_late, *families)


def asked(family: type[Backend], **changes: Any) -> Any:
    """A backend of the family that is asked for something else than the job asks for."""

    class Asked(family):  # type: ignore[misc,valid-type]
        def prepare(
            self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
        ) -> Engine:
            return super().prepare(build_model, build_optimizer, replace(context, **changes))

    return Asked


class Rebuilt(Backend):
    """Trains another model than the job's."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> nn.Module:
            return self.rebuilt(build_model(), context)

        return super().prepare(build, build_optimizer, context)  # type: ignore[safe-super]

    @abstractmethod
    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        """The model that is trained in place of the job's."""


class Bf16Reduction(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        def reduce_in_bf16(_, bucket):
            low = bucket.buffer().to(torch.bfloat16) / context.world.world_size
            work = dist.all_reduce(low, async_op=True).get_future()
            return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))

        engine.module.register_comm_hook(None, reduce_in_bf16)


LibraryDefaultReduction = asked(Fsdp2Backend, preset="library-defaults")
"""Reduces in the compute dtype although the preset says fp32."""
WideReduction = asked(Fsdp2Backend, preset="like-for-like")
"""Reduces in fp32 although the job asks for the library's default, which is the compute dtype."""


def scaling(factor: Callable[[SetupContext], float]) -> Spoil:
    """Gradients of a loss that is multiplied by a factor."""
    return lambda _, engine, context: scale_loss(engine, factor(context))


_drop_one_rank = scaling(lambda context: float(context.world.rank != 1))
(GradientsSummed,) = spoiled(scaling(lambda context: context.world.world_size), DdpBackend)
(DividedTwice,) = spoiled(scaling(lambda context: 1 / context.accumulation_steps), DdpBackend)
(GradientsOfOneRankDropped,) = spoiled(_drop_one_rank, DdpBackend)
(GradientsOfOneRankShrunk,) = spoiled(scaling(lambda c: 0.99 if c.world.rank == 1 else 1.0), DdpBackend)
(GradientsOfOneRankGrown,) = spoiled(scaling(lambda c: 1.01 if c.world.rank == 1 else 1.0), DdpBackend)
(LateGradientsOfOneRankDropped,) = late(_drop_one_rank, DdpBackend)


class StepsAtEveryMicroBatch(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def backward(original: Any, loss: torch.Tensor, *, last_micro_step: bool) -> None:
            original(loss, last_micro_step=last_micro_step)
            if not last_micro_step:
                engine.optimizer.step()
                engine.optimizer.zero_grad()


class MeanPerRank(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def forward(original: Any, batch: Batch) -> torch.Tensor:
            own = (batch["labels"][:, 1:] != IGNORED).sum().float()
            whole = own.clone()
            dist.all_reduce(whole)
            return original(batch) * float(whole / own / context.world.world_size)


class SameBatchOnEveryRank(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def forward(original: Any, batch: Batch) -> torch.Tensor:
            shared = {key: value.clone() for key, value in batch.items()}
            for value in shared.values():
                dist.broadcast(value, 0)
            return original(shared)


class ShardedTwice(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original, world = engine.forward, context.world
        engine.forward = lambda batch: original(
            {key: value[world.rank :: world.world_size] for key, value in batch.items()}
        )


class SeedPerRank(Rebuilt, DdpBackend):
    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        torch.manual_seed(1000 + context.world.rank)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        return model


class ScheduleOncePerProcess(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step
        engine.step = lambda lr: original(lr / context.world.world_size)


class Untied(Rebuilt, DdpBackend):
    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model


class Frozen(Rebuilt, DdpBackend):
    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
        return model


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


class BlockNeverReduced(Rebuilt, DdpBackend):
    """DDP is told to leave a block alone."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        names = [name for name, _ in model.named_parameters() if "layers.1." in name]
        model._ddp_params_and_buffers_to_ignore = names
        return model


class NormOfTheShard(Spoiled, Fsdp2Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.strategy = replace(engine.strategy, norm_group=None)


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
        @instead(engine)
        def _update(original: Any) -> None:
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.25)
            original()


class Checkpointed(Rebuilt, DdpBackend):
    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


class Compiled(Rebuilt, DdpBackend):
    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        model.compile(backend="eager")
        return model


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


class SleepsInForward(Defect):
    """Rank 1 sleeps in each forward pass: longer than tests beside it disturb, unless told otherwise."""

    where = "forward"

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = getattr(engine, self.where)

        def pass_after_sleep(*arguments: Any, **keywords: Any) -> Any:
            if context.world.rank == 1:
                time.sleep(float(os.environ.get(SLEEP_SECONDS, "0.2")))
            return original(*arguments, **keywords)

        setattr(engine, self.where, pass_after_sleep)


class SleepsInBackward(SleepsInForward):
    """Rank 1 sleeps in each backward pass."""

    where = "backward"


class StaleWeightsOnOneRank(StaleWeights):
    pass


class LossOfRankZero(Defect):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def forward(original: Any, batch: Batch) -> torch.Tensor:
            loss = original(batch)
            return loss if context.world.rank == 0 else loss - loss.detach()


class LossOfRankZeroForAll(Defect):
    """Every rank reports what rank 0 computed."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def forward(original: Any, batch: Batch) -> torch.Tensor:
            loss = original(batch)
            shown = loss.detach().clone()
            dist.broadcast(shown, 0)
            return loss + (shown - loss.detach())


class FrozenWeightsTrained(Defect):
    """Frozen weights are given to the optimizer, and get gradients of ones."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        engine.optimizer.add_param_group({"params": frozen, "weight_decay": 0.0})

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            for parameter in frozen:
                parameter.grad = torch.full_like(parameter, 1e-8)
            return float(original(lr))


class LastHeldOutSampleDropped(Defect):
    """Evaluation masks the last sample of each batch and still divides by all targets."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine)
        def forward(original: Any, batch: Batch) -> torch.Tensor:
            if not torch.is_grad_enabled():
                batch = batch | {"labels": batch["labels"].clone()}
                batch["labels"][-1] = IGNORED
            return original(batch)


class NothingUpdated(Defect):
    """No update is made."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine._update = lambda: None


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


class UpdatePutOff(Defect):
    """Makes each update in the next forward pass, when the step's clock has stopped."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        update, forward, pieces = engine._update, engine.forward, engine.weight_pieces
        kept: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

        def put_off() -> None:
            kept.extend((parameter, parameter.grad) for parameter in engine.module.parameters())

        def due() -> None:
            if kept:
                for parameter, gradient in kept:
                    parameter.grad = gradient
                kept.clear()
                update()
                engine.optimizer.zero_grad(set_to_none=True)

        engine._update = put_off
        engine.forward = lambda batch: (due(), forward(batch))[1]
        engine.weight_pieces = lambda: (due(), pieces())[1]


class ComputesInFp32(Defect):
    """Turns autocast off within the model."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        @instead(engine.module.module)
        def forward(original: Any, *arguments: Any, **keywords: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return original(*arguments, **keywords)


class BlockSkippedOnOneRank(Defect):
    """Rank 1 leaves a block out of its backward pass."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            block = engine.module.module.blocks[1]

            @instead(block)
            def forward(original: Any, hidden: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    return hidden + (original(hidden) - hidden)


(LateSameBatchOnEveryRank,) = late(SameBatchOnEveryRank.spoil, DdpBackend)
(LateLossOfRankZero,) = late(LossOfRankZero.spoil, DdpBackend)
(LateBlockSkippedOnOneRank,) = late(BlockSkippedOnOneRank.spoil, DdpBackend)


def _decay_much(_: Any, engine: Any, __: SetupContext) -> None:
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = 10.0


(LateDecayOnEverything,) = late(_decay_much, DdpBackend)
