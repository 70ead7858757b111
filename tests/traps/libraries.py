"""Third-party backends around DeepSpeed, Trainer, pipelines and ranks that share samples, each with a known
trap."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from harness.backends.base import Batch, BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import Spoiled, instead
from harness.backends.options import AutoTp12Options
from harness.backends.pipeline.backend import PipelineBackend
from harness.backends.sequence import context_parallel
from harness.backends.sequence.context_parallel import ContextParallelBackend
from harness.backends.tensor import backend
from harness.backends.tensor.autotp import AutoTpBackend
from harness.backends.tensor.backend import TensorBackend
from harness.backends.trainer import engines
from harness.backends.trainer.backends import TrainerDdpBackend
from harness.backends.zero.backend import start_deepspeed

from .adapters import Rebuilt, spoiled
from .families import Stage2, Stage3


class TransposedBytes(Rebuilt, Stage2):
    """What ZenFlow leaves at stage 2: matrices that hold the bytes of their transpose."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data = parameter.data.t().contiguous().view(parameter.shape)
        return model


class DecayOfTheFirstGroup(Spoiled, Stage3):
    """What loading a universal checkpoint leaves at stage 3: every group has the first one's weight decay."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        first, *others = engine.engine.optimizer.param_groups
        for group in others:
            group["weight_decay"] = first["weight_decay"]


class PlainUnderZeroInit(Rebuilt, Stage3):
    """The model's class called plainly under `zero.Init`, where `_init_weights` sees empty tensors."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        deepspeed = start_deepspeed(context)
        torch.manual_seed(0)
        with deepspeed.zero.Init():
            made: nn.Module = type(model)(model.config)
        with torch.no_grad(), deepspeed.zero.GatheredParameters(list(made.parameters())):
            for (_, mine), (_, given) in zip(made.named_parameters(), model.named_parameters(), strict=True):
                given.copy_(mine)
        return model


class WeightsInUseLeftStale(Rebuilt, Spoiled, Stage2):
    """`safe_set_full_fp32_param` without `update_lp_params`: master weights are set, those in use are not."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        self.kept = {name: value.detach().clone() for name, value in model.named_parameters()}
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        return model

    def spoil(self, engine: Any, context: SetupContext) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in engine.engine.module.named_parameters():
            safe_set_full_fp32_param(parameter, self.kept[name])


class PiecesInUseLeftStale(WeightsInUseLeftStale):
    """The same at stage 3, which has no `update_lp_params`."""

    number = 3


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


class RingAroundEagerAttention(ContextParallelBackend):
    """`context_parallel` entered without asking what the model's attention is."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        with patch.object(context_parallel, "require_ring_attention"):
            return super().prepare(build_model, build_optimizer, context)


class ScaledByMicroBatches(Spoiled, PipelineBackend):
    """As torch's schedules do unless `scale_grads` is off, whatever the loss."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        engine.pipeline = replace(engine.pipeline, scale_grads=True)


class TiedApart(Spoiled, PipelineBackend):
    """Each end of the pipeline trains its copy of the tied weight by its own gradient."""

    def spoil(self, engine: Any, context: SetupContext) -> None:
        reduce, whole = engine._reduce, engine.pipeline
        alone = replace(whole, holders={name: ranks[:1] for name, ranks in whole.holders.items()})

        def apart() -> None:
            engine.pipeline = alone
            reduce()
            engine.pipeline = whole

        engine._reduce = apart


class TiedWeightsCutApart(TensorBackend):
    """Each style makes a parameter of its own, and nobody ties them again."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        backend._shared_parameters = lambda model: []
        return super().prepare(build_model, build_optimizer, context)


class KeptWhatIsAddedUpInPlace(AutoTpBackend):
    """AutoTP with ZeRO stage 1 as it is, under a recomputation that the built-in backend refuses."""

    Options = AutoTp12Options

    def __init__(self, options: AutoTp12Options) -> None:
        super().__init__(options, stage=1)


def _feed_differently(_: Any, engine: Any, context: SetupContext) -> None:
    """Each rank along 'tensor' computes on samples of its own, which DeepSpeed does not check here."""

    @instead(engine)
    def forward(original: Any, batch: Batch) -> Any:
        return original({name: values.roll(context.world.rank, dims=1) for name, values in batch.items()})


OtherSamplesOnEachTensorRank, OtherSamplesUnderAutoTp = spoiled(
    _feed_differently, TensorBackend, KeptWhatIsAddedUpInPlace
)


class WideProducts(Rebuilt, DdpBackend):
    """Linear layers multiply as they did before they were converted to fp8."""

    def rebuilt(self, model: Any, context: SetupContext) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = nn.Linear
        return model  # type: ignore[no-any-return]


class OrthogonalisesRows(Fsdp2Backend):
    """Muon sees plain tensors and gathers nothing."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        pairs: list[tuple[Any, nn.Parameter]] = []

        def build(named: Any) -> Any:
            found = [(name, parameter) for name, parameter in named]
            pairs.extend((p, nn.Parameter(p.to_local().detach())) for _, p in found)
            return build_optimizer((name, rows) for (name, _), (_, rows) in zip(found, pairs, strict=True))

        engine: Any = super().prepare(build_model, build, context)

        @instead(engine)
        def step(original: Any, lr: float) -> float:
            for whole, rows in pairs:
                rows.grad = whole.grad.to_local()
                whole.grad = None
            return float(original(lr))

        return engine  # type: ignore[no-any-return]
