"""Third-party backends that change gradients on their way to the update, or leave buffers, of each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from harness.backends.base import Batch, SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp1 import Fsdp1Backend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend

from .execution import Hybrid, Spoiled, Stage1, Stage2, Stage3


def bare(engine: Any) -> nn.Module:
    module = getattr(engine, "engine", engine).module
    return getattr(module, "module", module)


def _add_decay(_: Any, engine: Any, __: SetupContext) -> None:
    """As Adam has it: weight decay in the gradient, after it was clipped."""

    def add(live: torch.optim.Optimizer, *_: Any) -> None:
        for group in live.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=group["weight_decay"])

    optimizer = getattr(engine, "engine", engine).optimizer
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's around torch's
        optimizer = optimizer.optimizer
    optimizer.register_step_pre_hook(add)


class DecayAddedOfDdp(Spoiled, DdpBackend):
    spoil = _add_decay


class DecayAddedOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _add_decay


class DecayAddedOfFsdp1(Spoiled, Fsdp1Backend):
    spoil = _add_decay


class DecayAddedAtStage1(Spoiled, Stage1):
    spoil = _add_decay


class DecayAddedAtStage3(Spoiled, Stage3):
    spoil = _add_decay


def _clip_each_micro_step(_: Any, engine: Any, __: SetupContext) -> None:
    original = engine.backward

    def backward(loss: torch.Tensor, *, last_micro_step: bool) -> None:
        original(loss, last_micro_step=last_micro_step)
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.3)

    engine.backward = backward


class ClippedEachMicroStepOfDdp(Spoiled, DdpBackend):
    spoil = _clip_each_micro_step


class ClippedEachMicroStepOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _clip_each_micro_step


def _scale_by_frequency(_: Any, engine: Any, __: SetupContext) -> None:
    for module in bare(engine).modules():
        if isinstance(module, nn.Embedding):
            module.scale_grad_by_freq = True


class EmbeddingScaledOfDdp(Spoiled, DdpBackend):
    spoil = _scale_by_frequency


class EmbeddingScaledOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _scale_by_frequency


class EmbeddingScaledAtStage1(Spoiled, Stage1):
    spoil = _scale_by_frequency


class EmbeddingScaledAtStage3(Spoiled, Stage3):
    spoil = _scale_by_frequency


def _forget_other_shards(_: Any, engine: Any, __: SetupContext) -> None:
    engine.strategy = replace(engine.strategy, norm_group=None)


class NormOfTheShardOfFsdp1(Spoiled, Fsdp1Backend):
    spoil = _forget_other_shards


class NormOfTheShardOfHybrid(Spoiled, Hybrid):
    spoil = _forget_other_shards


class NormOfTheShardAtStage1(Spoiled, Stage1):
    """Each rank divides its partition by that partition's norm; the norm that is told is the global one."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        optimizer = engine.engine.optimizer
        original = optimizer.unscale_and_clip_grads

        def clip(gradients: list[torch.Tensor], _: Any, *rest: Any) -> Any:
            own = torch.stack([gradient.norm() for gradient in gradients]).norm()
            return original(gradients, own, *rest)

        optimizer.unscale_and_clip_grads = clip


class NormOfTheShardAtStage3(Spoiled, Stage3):
    """The same of what a rank holds of a sub-group."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        optimizer = engine.engine.optimizer
        original = optimizer.unscale_and_clip_grads

        def clip(sub_group: int, _: Any) -> Any:
            return original(sub_group, optimizer.fp32_partitioned_groups_flat[sub_group].grad.norm())

        optimizer.unscale_and_clip_grads = clip


class NoDropoutOnOneRank(Spoiled, Fsdp2Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            for layer in bare(engine).model.layers:  # type: ignore[union-attr]
                layer.self_attn.attention_dropout = 0.0


def _keep_statistics(_: Any, engine: Any, __: SetupContext) -> None:
    for module in bare(engine).modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.0


class StatisticsKeptOfDdp(Spoiled, DdpBackend):
    spoil = _keep_statistics


class StatisticsKeptOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _keep_statistics


class StatisticsKeptAtStage2(Spoiled, Stage2):
    spoil = _keep_statistics


class StatisticsKeptOnOneRank(Spoiled, Fsdp1Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            _keep_statistics(self, engine, context)


class WeightsOneStepBehind(Spoiled, DdpBackend):
    """Passes use a copy of the weights that is renewed before each update, not after it."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        model, original, step = bare(engine), engine.forward, engine.step
        copies = {parameter: parameter.detach().clone() for parameter in model.parameters()}
        masters: dict[nn.Parameter, torch.Tensor] = {}

        def forward(batch: Batch) -> torch.Tensor:
            for parameter, copy in copies.items():
                masters.setdefault(parameter, parameter.data)
                parameter.data = copy
            return original(batch)

        def update(lr: float) -> float:
            for parameter, master in masters.items():
                parameter.data = master
                copies[parameter] = master.clone()
            masters.clear()
            return float(step(lr))

        engine.forward, engine.step = forward, update


def _clip_each_parameter(_: Any, engine: Any, __: SetupContext) -> None:
    original = engine._update

    def update() -> None:
        for parameter in engine.module.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.1)
        original()

    engine._update = update


class ClippedByParameterOfDdp(Spoiled, DdpBackend):
    spoil = _clip_each_parameter


class ClippedByParameterOfFsdp(Spoiled, Fsdp2Backend):
    spoil = _clip_each_parameter


def _scale_the_loss(_: Any, engine: Any, __: SetupContext) -> None:
    """As a loss scaler whose gradients nobody unscales."""
    original = engine.backward
    engine.backward = lambda loss, **rest: original(128 * loss, **rest)


class NotUnscaledOfDdp(Spoiled, DdpBackend):
    spoil = _scale_the_loss


class NotUnscaledAtStage2(Spoiled, Stage2):
    spoil = _scale_the_loss


class NotUnscaledOfFsdp1(Spoiled, Fsdp1Backend):
    spoil = _scale_the_loss
