"""Third-party backends around DeepSpeed and Trainer, each with a known trap of the library."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from harness.backends.base import BackendOptions, BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.trainer import engines
from harness.backends.trainer.backends import TrainerDdpBackend
from harness.backends.zero.backend import ZeroBackend, start_deepspeed


class ZeroDefect(ZeroBackend):
    """ZeRO that takes its model from `rebuilt`, and is `spoil`ed once it is prepared."""

    stage = 2

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options, stage=type(self).stage)

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        model = build_model()
        kept = {name: value.detach().clone() for name, value in model.named_parameters()}
        engine = super().prepare(lambda: self.rebuilt(model, context), build_optimizer, context)
        self.spoil(engine, kept)
        return engine

    @abstractmethod
    def rebuilt(self, model: nn.Module, context: SetupContext) -> nn.Module:
        """The model that is trained in place of the job's."""

    def spoil(self, engine: Any, kept: dict[str, torch.Tensor]) -> None:
        """Plant what comes after preparation; `kept`: the job's initial weights by name."""


class TransposedBytes(ZeroDefect):
    """What ZenFlow leaves at stage 2: matrices that hold the bytes of their transpose."""

    def rebuilt(self, model: nn.Module, context: SetupContext) -> nn.Module:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data = parameter.data.t().contiguous().view(parameter.shape)
        return model


class DecayOfTheFirstGroup(ZeroDefect):
    """What loading a universal checkpoint leaves at stage 3: every group has the first one's weight decay."""

    stage = 3

    def rebuilt(self, model: nn.Module, context: SetupContext) -> nn.Module:
        return model

    def spoil(self, engine: Any, kept: dict[str, torch.Tensor]) -> None:
        first, *others = engine.engine.optimizer.param_groups
        for group in others:
            group["weight_decay"] = first["weight_decay"]


class PlainUnderZeroInit(ZeroDefect):
    """The model's class called plainly under `zero.Init`, where `_init_weights` sees empty tensors."""

    stage = 3

    def rebuilt(self, model: nn.Module, context: SetupContext) -> nn.Module:
        deepspeed = start_deepspeed(context)
        torch.manual_seed(0)
        with deepspeed.zero.Init():
            made: nn.Module = type(model)(model.config)
        with torch.no_grad(), deepspeed.zero.GatheredParameters(list(made.parameters())):
            for (_, mine), (_, given) in zip(made.named_parameters(), model.named_parameters(), strict=True):
                given.copy_(mine)
        return model


class WeightsInUseLeftStale(ZeroDefect):
    """`safe_set_full_fp32_param` without `update_lp_params`: master weights are set, those in use are not."""

    def rebuilt(self, model: nn.Module, context: SetupContext) -> nn.Module:
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        return model

    def spoil(self, engine: Any, kept: dict[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in engine.engine.module.named_parameters():
            safe_set_full_fp32_param(parameter, kept[name])


class PiecesInUseLeftStale(WeightsInUseLeftStale):
    """The same at stage 3, which has no `update_lp_params`."""

    stage = 3


class TrainerFsdpOnTheCpu(TrainerDdpBackend):
    """Trainer asked for FSDP2 on the CPU: it runs DDP without a word."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:

        original = engines.training_arguments

        def asked(context: SetupContext, **given: Any) -> Any:
            return original(context, fsdp=True, fsdp_config={"version": 2}, **given)

        with patch.object(engines, "training_arguments", asked):
            engine: Any = super().prepare(build_model, build_optimizer, context)
        engine.strategy = replace(engine.strategy, requested_name="FSDP2 FULL_SHARD")
        return engine  # type: ignore[no-any-return]
