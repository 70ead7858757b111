"""Pipelines with a known trap each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.pipeline.backend import PipelineBackend


class ScaledByMicroBatches(PipelineBackend):
    """As torch's schedules do unless `scale_grads` is off, whatever the loss."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        engine.pipeline = replace(engine.pipeline, scale_grads=True)
        return engine  # type: ignore[no-any-return]


class TiedApart(PipelineBackend):
    """Each end of the pipeline trains its copy of the tied weight by its own gradient."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine: Any = super().prepare(build_model, build_optimizer, context)
        reduce, whole = engine._reduce, engine.pipeline
        alone = replace(whole, holders={name: ranks[:1] for name, ranks in whole.holders.items()})

        def apart() -> None:
            engine.pipeline = alone
            reduce()
            engine.pipeline = whole

        engine._reduce = apart
        return engine  # type: ignore[no-any-return]
