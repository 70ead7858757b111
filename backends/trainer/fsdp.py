"""FSDP2 and FSDP1 as `transformers.Trainer` sets them up from `fsdp` and `fsdp_config`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch import nn

from harness.backends.base import BuildOptimizer, SetupContext, Unsupported
from harness.backends.prepared_fsdp import PreparedFsdpBackend, offloads
from harness.backends.torch_engine import TorchEngine


class TrainerFsdpBackend(PreparedFsdpBackend):
    """Trainer with `fsdp=True` and the version in `fsdp_config`."""

    packages = ("torch", "accelerate", "transformers")
    library = "transformers"
    through = "Trainer"
    on_the_cpu = (
        f"with accelerate {version('accelerate')} ignores Trainer's fsdp=True on the CPU and trains under "
        "DDP, without a word"
    )

    def _settings(self, model: nn.Module, context: SetupContext) -> dict[str, Any]:
        return self._common_settings(model, version="version", classes="transformer_layer_cls_to_wrap")

    def _prepare(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        build_optimizer: BuildOptimizer,
        context: SetupContext,
    ) -> tuple[Any, Any, Any, Any]:
        from harness.backends.trainer.held import HeldTrainer, training_arguments

        if offloads(self.options) and self.version == 2:
            raise Unsupported(
                f"transformers {version('transformers')}: Trainer reduces the norm of offloaded gradients on "
                "the CPU, which NCCL cannot reach"
            )
        arguments = training_arguments(context, fsdp=True, fsdp_config=dict(settings))
        trainer = HeldTrainer(model, arguments, context, build_optimizer)
        self._require_fsdp(trainer.accelerator)
        trainer.start()
        return trainer, trainer.accelerator, trainer.model_wrapped, trainer.optimizer

    def _engine(self, driver: Any, *arguments: Any) -> TorchEngine:
        from harness.backends.trainer.engines import TrainerFsdp1Engine, TrainerFsdp2Engine, details_of

        engine_class = TrainerFsdp2Engine if self.version == 2 else TrainerFsdp1Engine
        engine = engine_class(*arguments)
        engine.strategy.details.update(details_of(driver))
        engine.trainer = driver
        return engine
