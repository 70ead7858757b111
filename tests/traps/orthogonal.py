"""FSDP2 whose optimizer is given each rank's rows as matrices of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.fsdp.fsdp2 import Fsdp2Backend


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
        original = engine.step

        def step(lr: float) -> float:
            for whole, rows in pairs:
                rows.grad = whole.grad.to_local()
                whole.grad = None
            return float(original(lr))

        engine.step = step
        return engine  # type: ignore[no-any-return]
