"""Tensor parallelism with a known trap each."""

from __future__ import annotations

from typing import Any

from harness.backends import tensor_parallel
from harness.backends.base import Batch, BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.tensor import TensorBackend


class TiedWeightsCutApart(TensorBackend):
    """Each style makes a parameter of its own, and nobody ties them again."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        tensor_parallel._shared_parameters = lambda model: []
        return super().prepare(build_model, build_optimizer, context)


class OtherSamplesOnEachTensorRank(TensorBackend):
    """Each rank along 'tensor' computes on samples of its own."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        original = engine.forward

        def forward(batch: Batch) -> Any:
            return original({name: values.roll(context.world.rank, dims=1) for name, values in batch.items()})

        engine.forward = forward
        return engine  # type: ignore[no-any-return]
