"""Engines with a defect each, which the contract must reject."""

from __future__ import annotations

from dataclasses import replace

from backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from backends.ddp import DdpBackend


class LossScaledTwice(DdpBackend):
    """Divides by the accumulation steps although the loop has normalised already; here always by 2."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        original = engine.backward
        engine.backward = lambda loss, **rest: original(loss / 2, **rest)  # type: ignore[method-assign]
        return engine


class GradientsSummed(DdpBackend):
    """Sums gradients over ranks where the contract says mean."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        original = engine.backward
        size = context.world.world_size
        engine.backward = lambda loss, **rest: original(loss * size, **rest)  # type: ignore[method-assign]
        return engine


class NoClipping(DdpBackend):
    """Ignores the clipping that the job asks for."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        return super().prepare(build_model, build_optimizer, replace(context, gradient_clipping=None))


class LastMicroStepOnly(DdpBackend):
    """Drops the gradients of every micro-step but the last."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        original = engine.backward
        engine.backward = lambda loss, last_micro_step: original(  # type: ignore[method-assign]
            loss * float(last_micro_step), last_micro_step=last_micro_step
        )
        return engine
