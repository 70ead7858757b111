"""DDP and ZeRO as `transformers.Trainer` sets them up from its arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from torch import nn

from harness.backends.libraries.facts import offloads
from harness.backends.zero.backend import PreparedZeroBackend

from ..accelerate import prepared_ddp_strategy, refuse_without_autocast
from ..base import Backend, BuildModel, BuildOptimizer, Engine, SetupContext, Unsupported
from ..fsdp.prepared import PreparedFsdpBackend
from ..model.blocks import parameter_count
from ..options import ReductionOptions
from ..presets import trainer_ddp_changes
from ..torch_engine import TorchEngine
from ..zero.engine import ZeroEngine


class TrainerDdpBackend(Backend):
    """Trainer on several ranks, without `fsdp` and `deepspeed`: DDP."""

    Options = ReductionOptions
    packages = ("torch", "accelerate", "transformers")

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        from harness.backends.trainer.engines import (
            HeldTrainer,
            TrainerDdpEngine,
            reduced_as,
            training_arguments,
        )

        given: dict[str, Any] = {c.setting: c.value for c in trainer_ddp_changes(context.preset)}
        model = build_model()
        count = parameter_count(model)
        arguments = training_arguments(context, **given, **reduced_as(self.options))
        trainer = HeldTrainer(model, arguments, context, build_optimizer)
        refuse_without_autocast(trainer.accelerator, context)
        trainer.start()
        prepared: Any = trainer.model_wrapped
        optimizer: Any = trainer.optimizer
        strategy = prepared_ddp_strategy(
            prepared, trainer.accelerator, context, count, given, through="Trainer"
        )
        if isinstance(prepared, nn.parallel.DistributedDataParallel):
            strategy.details["gradient_as_bucket_view"] = prepared.gradient_as_bucket_view
            strategy.details["find_unused_parameters"] = prepared.find_unused_parameters
        return TrainerDdpEngine(trainer, prepared, optimizer, context, strategy, trainer.accelerator.scaler)


class TrainerZeroBackend(PreparedZeroBackend):
    """Trainer with a DeepSpeed configuration."""

    packages = ("torch", "accelerate", "transformers", "deepspeed")
    library = "transformers"

    def _prepare(
        self, model: nn.Module, config: dict[str, Any], build_optimizer: BuildOptimizer, context: SetupContext
    ) -> tuple[Callable[..., ZeroEngine], Any, dict[str, Any]]:
        from harness.backends.trainer.engines import HeldTrainer, TrainerZeroEngine, training_arguments

        arguments = training_arguments(
            context,
            deepspeed=config,
            # Trainer refuses a configuration that contradicts its arguments.
            max_grad_norm=config.get("gradient_clipping", 0.0),
            bf16=config.get("bf16", {}).get("enabled", False),
        )
        trainer = HeldTrainer(model, arguments, context, build_optimizer)
        trainer.start()
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # Trainer sets its own level
        handed_over = dict(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
        return partial(TrainerZeroEngine, trainer), trainer.model_wrapped, handed_over


class TrainerFsdpBackend(PreparedFsdpBackend):
    """Trainer with `fsdp=True` and the version in `fsdp_config`."""

    packages = ("torch", "accelerate", "transformers")
    library = "transformers"
    through = "Trainer"
    on_the_cpu = (
        f"with accelerate {version('accelerate')} ignores Trainer's fsdp=True on the CPU and silently "
        "trains under DDP"
    )

    def _settings(self, model: nn.Module, context: SetupContext) -> dict[str, Any]:
        return self._common_settings(model, version="version", classes="transformer_layer_cls_to_wrap")

    def _prepare(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        build_optimizer: BuildOptimizer,
        context: SetupContext,
    ) -> tuple[Callable[..., TorchEngine], Any, Any, Any]:
        from harness.backends.trainer.engines import (
            HeldTrainer,
            TrainerFsdp1Engine,
            TrainerFsdp2Engine,
            reduced_as,
            training_arguments,
        )

        if offloads(self.options) and self.version == 2:
            raise Unsupported(
                f"transformers {version('transformers')}: Trainer reduces the norm of offloaded gradients on "
                "the CPU, which NCCL cannot reach"
            )
        arguments = training_arguments(
            context, fsdp=True, fsdp_config=dict(settings), **reduced_as(self.options)
        )
        trainer = HeldTrainer(model, arguments, context, build_optimizer)
        self._require_fsdp(trainer.accelerator)
        trainer.start()
        made: Any = TrainerFsdp2Engine if self.version == 2 else TrainerFsdp1Engine
        return partial(made, trainer), trainer.accelerator, trainer.model_wrapped, trainer.optimizer
