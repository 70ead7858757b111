"""DDP, ZeRO and FSDP through Hugging Face Accelerate: its `Accelerator`, its plugins, its backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends import base, presets
from harness.backends.ddp import DdpEngine, ddp_strategy
from harness.backends.fsdp.fsdp1 import Fsdp1Engine, fsdp1_mixed_precision, refuse_fused
from harness.backends.fsdp.fsdp2 import mixed_precision
from harness.backends.fsdp.prepared import PreparedFsdpBackend, syncs_each_batch
from harness.backends.model.blocks import parameter_count
from harness.backends.model.precision import autocast_dtype, scaler_arguments
from harness.backends.optimizer.groups import set_rates
from harness.backends.options import ReductionOptions, reduces_each
from harness.backends.torch_engine import TorchEngine, TorchStrategy
from harness.backends.zero.backend import PreparedZeroBackend
from harness.backends.zero.engine import ZeroEngine

from .fsdp.fsdp2 import Fsdp2Engine
from .zero.engine import forget_dummy_step

_MIXED_PRECISION = {"fp32": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16", "bf16": "no"}


class AccelerateEngineMixin:
    """Backward, unscaling and update as Accelerate does them."""

    optimizer: torch.optim.Optimizer

    def __init__(self, accelerator: Any, *args: Any) -> None:
        super().__init__(*args)
        self.accelerator = accelerator

    def _run_backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def _unscale(self) -> None:
        self.accelerator.unscale_gradients(self.optimizer)

    def _update(self) -> None:
        self.optimizer.step()

    def close(self) -> None:
        forget_accelerator()


class AccelerateDdpEngine(AccelerateEngineMixin, DdpEngine):
    """DDP as Accelerate prepares it."""


class AccelerateZeroEngine(ZeroEngine):
    """DeepSpeed as Accelerate prepares it."""

    def __init__(self, accelerator: Any, *args: Any) -> None:
        super().__init__(*args)
        self.accelerator = accelerator

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self.accelerator.gradient_state._set_sync_gradients(last_micro_step)
        # Accelerate 1.15 steps the optimizer inside backward, before the loop could set the
        # learning rate: keep the real step for `step`.
        self.engine.step = lambda: None
        try:
            self.accelerator.backward(loss, scale_wrt_gas=False)
        finally:
            del self.engine.step

    def close(self) -> None:
        super().close()
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        forget_accelerator()


class AccelerateDdpBackend(base.Backend):
    """`Accelerator` without a plugin: DDP."""

    Options = ReductionOptions
    packages = ("torch", "accelerate")

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        from accelerate.utils import DistributedDataParallelKwargs

        arguments: dict[str, Any] = {c.setting: c.value for c in presets.ddp_changes(context.preset)}
        accelerator = make_accelerator(
            context,
            cpu=context.world.device == "cpu",
            each=reduces_each(self.options),
            handlers=[DistributedDataParallelKwargs(**arguments)],
        )
        model = build_model()
        count = parameter_count(model)
        optimizer = build_optimizer(model.named_parameters())
        if context.world.device != "cpu":
            model.to(accelerator.device)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        strategy = prepared_ddp_strategy(prepared, accelerator, context, count, arguments)
        return AccelerateDdpEngine(accelerator, prepared, optimizer, context, strategy, accelerator.scaler)


def prepared_ddp_strategy(
    prepared: Any,
    accelerator: Any,
    context: base.SetupContext,
    count: int,
    arguments: dict[str, Any],
    *,
    through: str = "Accelerate",
) -> TorchStrategy:
    """What Accelerate prepared as DDP, whoever asked it to. Raises Unsupported where it is not."""
    # On one rank Accelerate wraps in DDP too, on the CPU.
    is_ddp = isinstance(prepared, nn.parallel.DistributedDataParallel)
    if context.world.world_size > 1 and not is_ddp:
        library = "accelerate" if through == "Accelerate" else "transformers"
        raise base.Unsupported(f"{library} {version(library)} prepared {type(prepared).__name__}, not DDP")
    config = {
        "mixed_precision": accelerator.mixed_precision,
        "distributed_type": str(accelerator.distributed_type.value),
        "ddp_kwargs": arguments,
    }
    found = ddp_strategy(
        prepared,
        config,
        count,
        autocast=False,  # Accelerate puts the autocast into the model's forward
        library_autocast=autocast_dtype(context.precision),
        details={"autocast": "inside the prepared forward"},
        reduces_each=syncs_each_batch(accelerator),
    )
    reduced = found.reduce_dtype if context.world.world_size > 1 else None
    return replace(found, name=f"{found.name} through {through}", reduce_dtype=reduced)


class AccelerateZeroBackend(PreparedZeroBackend):
    """`Accelerator` with a DeepSpeedPlugin."""

    packages = ("torch", "accelerate", "deepspeed")
    library = "accelerate"

    def _prepare(
        self,
        model: nn.Module,
        config: dict[str, Any],
        build_optimizer: base.BuildOptimizer,
        context: base.SetupContext,
    ) -> tuple[Callable[..., ZeroEngine], Any, dict[str, Any]]:
        from accelerate.utils import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(hf_ds_config=dict(config), zero3_init_flag=False)
        # With cpu=True Accelerate 1.15 drops the plugin and runs DDP.
        accelerator = make_accelerator(context, cpu=False, deepspeed_plugin=plugin)
        optimizer = build_optimizer(model.named_parameters())
        set_rates(optimizer, 0.0)
        engine, _ = accelerator.prepare(model, optimizer)
        forget_dummy_step(optimizer)
        return partial(AccelerateZeroEngine, accelerator), engine, dict(plugin.deepspeed_config)


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

    def _settings(self, model: nn.Module, context: base.SetupContext) -> dict[str, Any]:
        settings = self._common_settings(
            model, version="fsdp_version", classes="transformer_cls_names_to_wrap"
        )
        if presets.reduce_dtype_changes(context.precision, context.preset):
            policy = mixed_precision(context) if self.version == 2 else fsdp1_mixed_precision(context)
            settings["mixed_precision_policy"] = policy
        return settings

    def _prepare(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        build_optimizer: base.BuildOptimizer,
        context: base.SetupContext,
    ) -> tuple[Callable[..., TorchEngine], Any, Any, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin

        accelerator = make_accelerator(
            context,
            cpu=False,
            each=reduces_each(self.options),
            fsdp_plugin=FullyShardedDataParallelPlugin(**settings),
        )
        self._require_fsdp(accelerator)
        optimizer = build_optimizer(model.named_parameters())
        if self.version == 1 and context.precision == "fp16-mixed":
            refuse_fused(optimizer)
        made = AccelerateFsdp2Engine if self.version == 2 else AccelerateFsdp1Engine
        return partial(made, accelerator), accelerator, *accelerator.prepare(model, optimizer)


def forget_accelerator() -> None:
    """Drop Accelerate's process-wide state, so that another engine may be built in this process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def make_accelerator(
    context: base.SetupContext,
    *,
    cpu: bool,
    each: bool = False,
    handlers: list[Any] | None = None,
    **plugins: Any,
) -> Any:
    """Build the Accelerator; its own accumulation stays at 1, since the loop normalises.

    each: reduce gradients in every micro-step.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs

    handlers = list(handlers or [])
    if context.precision == "fp16-mixed" and "deepspeed_plugin" not in plugins:
        handlers.append(GradScalerKwargs(**scaler_arguments(context.loss_scale)))
    autocast = _MIXED_PRECISION[context.precision]
    if "fsdp_plugin" in plugins:
        for change in presets.accelerate_fsdp_changes(context.precision, context.preset):
            if change.setting == presets.ACCELERATOR_PRECISION:
                autocast = change.value
    if each:
        plugins["gradient_accumulation_plugin"] = GradientAccumulationPlugin(sync_each_batch=True)
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=autocast,
        gradient_accumulation_steps=context.accumulation_steps if "deepspeed_plugin" in plugins else 1,
        kwargs_handlers=handlers,
        **plugins,
    )
    if not plugins.keys() & {"deepspeed_plugin", "fsdp_plugin"}:
        refuse_without_autocast(accelerator, context)
    return accelerator


def refuse_without_autocast(accelerator: Any, context: base.SetupContext) -> None:
    """Raise Unsupported where Accelerate would train without the autocast that it was asked for."""
    if context.precision.endswith("-mixed") and not accelerator.native_amp:
        raise base.Unsupported(
            f"accelerate {version('accelerate')} was asked for {accelerator.mixed_precision} on "
            f"{context.world.device} and would silently train without autocast"
        )
