"""FSDP2 and FSDP1 through Hugging Face Accelerate's FullyShardedDataParallelPlugin."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.backends.accelerate import AccelerateEngineMixin, make_accelerator
from harness.backends.base import BuildOptimizer, SetupContext
from harness.backends.fsdp1 import Fsdp1Engine, fsdp1_mixed_precision, refuse_fused
from harness.backends.fsdp2 import mixed_precision
from harness.backends.prepared_fsdp import PreparedFsdpBackend
from harness.backends.presets import reduce_dtype_changes
from harness.backends.torch_engine import TorchEngine

from .fsdp2 import Fsdp2Engine


class AccelerateFsdp2Engine(AccelerateEngineMixin, Fsdp2Engine):
    """fully_shard as Accelerate prepares it."""


class AccelerateFsdp1Engine(AccelerateEngineMixin, Fsdp1Engine):
    """FSDP1 as Accelerate prepares it."""


class AccelerateFsdpBackend(PreparedFsdpBackend):
    """`Accelerator` with a FullyShardedDataParallelPlugin, version 1 or 2."""

    packages = ("torch", "accelerate")
    library = "accelerate"
    through = "Accelerate"
    on_the_cpu = (
        "ignores an FSDP plugin without an accelerator: it would run DDP (cpu=True) or unsynchronised "
        "processes under the name of FSDP"
    )

    def _settings(self, model: nn.Module, context: SetupContext) -> dict[str, Any]:
        settings = self._common_settings(
            model, version="fsdp_version", classes="transformer_cls_names_to_wrap"
        )
        if reduce_dtype_changes(context.precision, context.preset):
            policy = mixed_precision(context) if self.version == 2 else fsdp1_mixed_precision(context)
            settings["mixed_precision_policy"] = policy
        return settings

    def _prepare(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        build_optimizer: BuildOptimizer,
        context: SetupContext,
    ) -> tuple[Any, Any, Any, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin

        accelerator = make_accelerator(
            context, cpu=False, fsdp_plugin=FullyShardedDataParallelPlugin(**settings)
        )
        self._require_fsdp(accelerator)
        optimizer = build_optimizer(model.named_parameters())
        if self.version == 1 and context.precision == "fp16-mixed":
            refuse_fused(optimizer)
        return accelerator, accelerator, *accelerator.prepare(model, optimizer)

    def _engine(self, driver: Any, *arguments: Any) -> TorchEngine:
        engine_class = AccelerateFsdp2Engine if self.version == 2 else AccelerateFsdp1Engine
        engine = engine_class(*arguments)
        engine.accelerator = driver
        return engine
