"""Tensor parallelism with a known trap each."""

from __future__ import annotations

from typing import Any

from harness.backends.base import Batch, BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.options import AutoTp12Options
from harness.backends.tensor import backend
from harness.backends.tensor.autotp import AutoTpBackend
from harness.backends.tensor.backend import TensorBackend


class TiedWeightsCutApart(TensorBackend):
    """Each style makes a parameter of its own, and nobody ties them again."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        backend._shared_parameters = lambda model: []
        return super().prepare(build_model, build_optimizer, context)


class OtherSamplesOnEachTensorRank(TensorBackend):
    """Each rank along 'tensor' computes on samples of its own."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return _fed_differently(super().prepare(build_model, build_optimizer, context), context)


class KeptWhatIsAddedUpInPlace(AutoTpBackend):
    """AutoTP with ZeRO stage 1 as it is, under a recomputation that the built-in backend refuses."""

    Options = AutoTp12Options

    def __init__(self, options: AutoTp12Options) -> None:
        super().__init__(options, stage=1)


class OtherSamplesUnderAutoTp(KeptWhatIsAddedUpInPlace):
    """Each rank along 'tensor' computes on samples of its own, which DeepSpeed does not check here."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return _fed_differently(super().prepare(build_model, build_optimizer, context), context)


def _fed_differently(engine: Any, context: SetupContext) -> Engine:
    original = engine.forward

    def forward(batch: Batch) -> Any:
        return original({name: values.roll(context.world.rank, dims=1) for name, values in batch.items()})

    engine.forward = forward
    return engine  # type: ignore[no-any-return]
