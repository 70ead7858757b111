"""Third-party backends that run the model too often, in the wrong mode, or otherwise on one rank."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from harness.backends.base import (
    Backend,
    BackendOptions,
    Batch,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
)
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp1 import Fsdp1Backend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.options import Fsdp2HybridOptions
from harness.backends.zero.backend import ZeroBackend


class Spoiled(Backend):
    """Whatever engine its other base prepares, until `spoil` has had its way."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)  # type: ignore[safe-super]
        self.spoil(engine, context)
        return engine

    @abstractmethod
    def spoil(self, engine: Any, context: SetupContext) -> None:
        """Plant the defect."""


class Stage1(ZeroBackend):
    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=1)


class Stage2(ZeroBackend):
    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=2)


class Stage3(ZeroBackend):
    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=3)


class Hybrid(Fsdp2Backend):
    Options = Fsdp2HybridOptions

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, sharding="hybrid")


def live_groups(engine: Any) -> list[dict[str, Any]]:
    """Groups of the optimizer that trains; a DeepSpeed engine holds its own."""
    return list(getattr(engine, "engine", engine).optimizer.param_groups)


class ForwardTwice(Spoiled, Stage2):
    """Runs each micro-batch once more to log its loss."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.forward

        def forward(batch: Batch) -> torch.Tensor:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    getattr(engine, "engine", engine).module(batch.get("left", batch.get("points")))
            return original(batch)

        engine.forward = forward


class BackwardInHalves(Spoiled, Fsdp2Backend):
    """Each backward pass in two, of half the loss."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.backward

        def backward(loss: torch.Tensor, *, last_micro_step: bool) -> None:
            (loss / 2).backward(retain_graph=True)
            original(loss / 2, last_micro_step=last_micro_step)

        engine.backward = backward


class TrainsInEvaluationMode(Spoiled, Stage2):
    """Forgets to go back to training after the first evaluation."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.train
        engine.train = lambda mode=True: None if mode else original(mode)


class EvaluatesInTrainingMode(Spoiled, Fsdp2Backend):
    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.train = lambda mode=True: None


class DecayOfOneRank(Spoiled, Fsdp1Backend):
    """Rank 1 decays its shards ten times as fast."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == 1:
            for group in live_groups(engine):
                group["weight_decay"] *= 10


class ClippedOnOneRank(Spoiled, DdpBackend):
    """Rank 1 clips once more, at 0.1."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine._update

        def update() -> None:
            if context.world.rank == 1:
                nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
            original()

        engine._update = update


class RateOfOneRank(Spoiled, Stage1):
    """Rank 1 warms up once more."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step
        engine.step = lambda lr: original(lr / 2 if context.world.rank == 1 else lr)


class ForwardTwiceAtStage3(Spoiled, Stage3):
    spoil = ForwardTwice.spoil


class ForwardTwiceOfHybrid(Spoiled, Hybrid):
    spoil = ForwardTwice.spoil


class BackwardInHalvesOfHybrid(Spoiled, Hybrid):
    spoil = BackwardInHalves.spoil


class TrainsInEvaluationModeAtStage3(Spoiled, Stage3):
    spoil = TrainsInEvaluationMode.spoil


class TrainsInEvaluationModeOfHybrid(Spoiled, Hybrid):
    spoil = TrainsInEvaluationMode.spoil


class EvaluatesInTrainingModeAtStage3(Spoiled, Stage3):
    spoil = EvaluatesInTrainingMode.spoil


class DecayOfOneRankAtStage3(Spoiled, Stage3):
    spoil = DecayOfOneRank.spoil


class DecayOfOneRankOfHybrid(Spoiled, Hybrid):
    spoil = DecayOfOneRank.spoil


class RotaryInBf16(Spoiled, Fsdp2Backend):
    """The frequencies of rotary positions pass through bf16, as where a model is cast and cast back."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        rotary = engine.module.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()


class WeightsRounded(Spoiled, Fsdp1Backend):
    """Every update is rounded to bf16, in masters of fp32."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        original = engine.step

        def step(lr: float) -> float:
            norm = float(original(lr))
            with torch.no_grad():
                for group in live_groups(engine):
                    for parameter in group["params"]:
                        parameter.copy_(parameter.bfloat16().float())
            return norm

        engine.step = step
