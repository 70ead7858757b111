"""DDP that loses the fp8 layers of a model on the way."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.ddp import DdpBackend


class WideProducts(DdpBackend):
    """Linear layers multiply as they did before they were converted."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        def build() -> Any:
            model = build_model()
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.__class__ = nn.Linear
            return model

        return super().prepare(build, build_optimizer, context)
