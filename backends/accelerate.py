"""The same strategies through Hugging Face Accelerate: its `Accelerator`, its plugins, its backward."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import (
    Backend,
    BackendOptions,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
    Unsupported,
    World,
)
from harness.backends.blocks import parameter_count, transformer_blocks
from harness.backends.ddp import DdpEngine
from harness.backends.fsdp1 import Fsdp1Engine, fsdp1_full_parameters, fsdp1_mixed_precision, fsdp1_unit_names
from harness.backends.fsdp2 import fsdp2_full_parameters, fsdp2_unit_names, mixed_precision, synchronise
from harness.backends.fsdp2_engine import Fsdp2Engine
from harness.backends.options import NoOptions, ShardedOptions, ZeroOptions
from harness.backends.precision import autocast_dtype, scaler_arguments
from harness.backends.presets import (
    ACCELERATOR_PRECISION,
    accelerate_fsdp_changes,
    ddp_changes,
    reduce_dtype_changes,
)
from harness.backends.torch_engine import Strategy
from harness.backends.zero import import_deepspeed
from harness.backends.zero_config import zero_config
from harness.backends.zero_engine import ZeroEngine, forget_dummy_step

_MIXED_PRECISION = {"fp32": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16", "bf16": "no"}


class AccelerateEngineMixin:
    """Backward, unscaling and update as Accelerate does them."""

    accelerator: Any
    optimizer: torch.optim.Optimizer

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


class AccelerateFsdp2Engine(AccelerateEngineMixin, Fsdp2Engine):
    """fully_shard as Accelerate prepares it."""


class AccelerateFsdp1Engine(AccelerateEngineMixin, Fsdp1Engine):
    """FSDP1 as Accelerate prepares it."""


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


class AccelerateDdpBackend(Backend):
    """`Accelerator` without a plugin: DDP."""

    Options = NoOptions
    packages = ("torch", "accelerate")

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        from accelerate.utils import DistributedDataParallelKwargs

        arguments: dict[str, Any] = {c.setting: c.value for c in ddp_changes(context.preset)}
        accelerator = _accelerator(
            context,
            cpu=context.world.device == "cpu",
            handlers=[DistributedDataParallelKwargs(**arguments)],
        )
        model = build_model()
        count = parameter_count(model)
        optimizer = build_optimizer(model.named_parameters())
        if context.world.device != "cpu":
            model.to(accelerator.device)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        if context.world.world_size > 1 and not isinstance(prepared, nn.parallel.DistributedDataParallel):
            raise Unsupported(
                f"accelerate {version('accelerate')} prepared {type(prepared).__name__}, not DDP"
            )
        distributed = context.world.world_size > 1
        is_ddp = isinstance(prepared, nn.parallel.DistributedDataParallel)  # on one rank too, on the CPU
        dtype = next(model.parameters()).dtype
        strategy = Strategy(
            name=f"{type(prepared).__name__} through Accelerate",
            native_config={
                "mixed_precision": accelerator.mixed_precision,
                "distributed_type": str(accelerator.distributed_type.value),
                "ddp_kwargs": arguments,
            },
            wrap_units=[""],
            reduce_dtype=dtype if distributed else None,
            parameter_count=count,
            compute_dtype=dtype,
            autocast=False,  # Accelerate puts the autocast into the model's forward
            offload=[],
            library_autocast=autocast_dtype(context.precision),
            details={"autocast": "inside the prepared forward"},
            **({"skip_synchronisation": prepared.no_sync} if is_ddp else {}),
        )
        engine = AccelerateDdpEngine(prepared, optimizer, context, strategy, accelerator.scaler)
        engine.accelerator = accelerator
        return engine


class AccelerateZeroBackend(Backend):
    """`Accelerator` with a DeepSpeedPlugin."""

    Options = ZeroOptions
    packages = ("torch", "accelerate", "deepspeed")

    def __init__(self, options: BackendOptions, *, stage: int) -> None:
        super().__init__(options)
        assert isinstance(options, ZeroOptions)
        self.zero_options = options
        self.stage = stage

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        deepspeed = import_deepspeed(context.world, context.precision)
        deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        from accelerate.utils import DeepSpeedPlugin

        # Before the plugin: once that exists, transformers builds partitioned models at stage 3 and
        # draws other initial weights.
        model = build_model()
        count = parameter_count(model)
        config = zero_config(self.stage, self.zero_options, context, count)
        plugin = DeepSpeedPlugin(hf_ds_config=dict(config), zero3_init_flag=False)
        # With cpu=True Accelerate 1.15 drops the plugin and runs DDP.
        accelerator = _accelerator(context, cpu=False, deepspeed_plugin=plugin)
        optimizer = build_optimizer(model.named_parameters())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        engine, _ = accelerator.prepare(model, optimizer)
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise Unsupported(
                f"accelerate {version('accelerate')} prepared {type(engine).__name__}, not DeepSpeed"
            )
        forget_dummy_step(optimizer)
        handed_over = dict(plugin.deepspeed_config)
        return AccelerateZeroEngine(accelerator, engine, context, handed_over, self.stage, count)


class AccelerateFsdpBackend(Backend):
    """`Accelerator` with a FullyShardedDataParallelPlugin, version 1 or 2."""

    Options = ShardedOptions
    packages = ("torch", "accelerate")

    def __init__(self, options: BackendOptions, *, version: int) -> None:
        super().__init__(options)
        self.version = version

    def unmet_requirements(self, world: World) -> list[str]:
        if world.device == "cpu":
            return [
                f"accelerate {version('accelerate')} ignores an FSDP plugin without an accelerator: it "
                "would run DDP (cpu=True) or unsynchronised processes under the name of FSDP"
            ]
        return []

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        offload = getattr(self.options, "offload", "none") == "cpu"
        model = build_model()
        count = parameter_count(model)
        blocks = transformer_blocks(model)
        settings = {
            "fsdp_version": self.version,
            "reshard_after_forward": True if self.version == 2 else "FULL_SHARD",
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": sorted({type(b).__name__ for b in blocks.values()}),
            "cpu_offload": offload,
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        policy = mixed_precision(context) if self.version == 2 else fsdp1_mixed_precision(context)
        if reduce_dtype_changes(context.precision, context.preset):
            settings["mixed_precision_policy"] = policy
        if self.version == 1:
            settings |= {"use_orig_params": True, "sync_module_states": False}
        accelerator = _accelerator(context, cpu=False, fsdp_plugin=FullyShardedDataParallelPlugin(**settings))
        if accelerator.distributed_type is not DistributedType.FSDP:
            raise Unsupported(
                f"accelerate {version('accelerate')} chose {accelerator.distributed_type.value} "
                "although it was given an FSDP plugin"
            )
        optimizer = build_optimizer(model.named_parameters())
        prepared, optimizer = accelerator.prepare(model, optimizer)
        fsdp2 = self.version == 2
        in_force = accelerator.state.fsdp_plugin.mixed_precision_policy
        dtype = next(prepared.parameters()).dtype
        strategy = Strategy(
            name=f"{'fully_shard' if fsdp2 else prepared.sharding_strategy.name} through Accelerate",
            native_config={
                "mixed_precision": accelerator.mixed_precision,
                "fsdp_plugin": {
                    key: value if isinstance(value, (bool, int, str, list)) else str(value)
                    for key, value in settings.items()
                },
            },
            library_autocast=autocast_dtype(context.precision) if accelerator.native_amp else None,
            wrap_units=fsdp2_unit_names(prepared) if fsdp2 else fsdp1_unit_names(prepared),
            reduce_dtype=getattr(in_force, "reduce_dtype", None) or dtype,
            parameter_count=count,
            compute_dtype=getattr(in_force, "param_dtype", None) or dtype,
            autocast=False,
            offload=["weights", "gradients", "optimizer"] if offload else [],
            gather_dtype=getattr(in_force, "param_dtype", None) or dtype,
            details={"mixed_precision_policy": str(in_force)},
            norm_group=torch.distributed.group.WORLD,
            **(
                {
                    "set_synchronisation": lambda last: synchronise(prepared, last),
                    "named_full_parameters": lambda: fsdp2_full_parameters(prepared, "cuda"),
                }
                if fsdp2
                else {
                    "skip_synchronisation": prepared.no_sync,
                    "named_full_parameters": lambda: fsdp1_full_parameters(prepared),
                }
            ),
        )
        engine_class = AccelerateFsdp2Engine if fsdp2 else AccelerateFsdp1Engine
        engine = engine_class(prepared, optimizer, context, strategy, accelerator.scaler)
        engine.accelerator = accelerator
        return engine


def forget_accelerator() -> None:
    """Drop Accelerate's process-wide state, so that another engine may be built in this process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def _accelerator(
    context: SetupContext, *, cpu: bool, handlers: list[Any] | None = None, **plugins: Any
) -> Any:
    """Build the Accelerator; its own accumulation stays at 1, since the loop normalises."""
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    handlers = list(handlers or [])
    if context.precision == "fp16-mixed" and "deepspeed_plugin" not in plugins:
        handlers.append(GradScalerKwargs(**scaler_arguments(context.loss_scale)))
    autocast = _MIXED_PRECISION[context.precision]
    if "fsdp_plugin" in plugins:
        for change in accelerate_fsdp_changes(context.precision, context.preset):
            if change.setting == ACCELERATOR_PRECISION:
                autocast = change.value
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=autocast,
        gradient_accumulation_steps=context.accumulation_steps if "deepspeed_plugin" in plugins else 1,
        kwargs_handlers=handlers,
        **plugins,
    )
    mixed = context.precision.endswith("-mixed") and not plugins
    if mixed and not accelerator.native_amp:
        raise Unsupported(
            f"accelerate {version('accelerate')} was asked for {accelerator.mixed_precision} on "
            f"{context.world.device} and would silently train without autocast"
        )
    return accelerator
