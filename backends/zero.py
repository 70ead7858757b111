"""DeepSpeed ZeRO, stages 0 to 3, through `deepspeed.initialize` with a client AdamW."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from harness.backends.base import (
    Backend,
    BackendOptions,
    BuildModel,
    BuildOptimizer,
    Engine,
    Precision,
    SetupContext,
    Unsupported,
    World,
)
from harness.backends.blocks import block_classes, parameter_count
from harness.backends.cpu_adam import cpu_adam
from harness.backends.extension_builds import unmet_build
from harness.backends.extensions import (
    ASYNC_IO,
    CPU_ADAM,
    runs_cpu_adam,
    swaps_into_files,
    unmet_buffers,
    unmet_cpu_adam,
    unmet_files,
)
from harness.backends.floating_inputs import refuse_batch_norm
from harness.backends.hybrid import unmet_second_copy
from harness.backends.loading import fill_zero3, reserve_parameters, this_device
from harness.backends.model_source import Loading, ModelSource, model_source
from harness.backends.not_run import reasons_not_run
from harness.backends.options import ZeroOptions, gathers_blocks
from harness.backends.precision import cast_parameters, compute_dtype
from harness.backends.swapping import SwappingEngine, lay_files, require_swappable
from harness.backends.zero_config import zero_config
from harness.backends.zero_engine import ZeroEngine
from harness.backends.zero_hooks import hooked_without_gather
from harness.backends.zero_loss_scale import forget_dummy_step
from harness.backends.zero_low_bit import require_whole_blocks

if TYPE_CHECKING:
    from types import ModuleType


class ZeroBackend(Backend):
    """One ZeRO stage."""

    Options = ZeroOptions
    packages: ClassVar[tuple[str, ...]] = ("torch", "deepspeed")

    def __init__(self, options: BackendOptions, *, stage: int = 0) -> None:
        super().__init__(options)
        assert isinstance(options, ZeroOptions)
        self.zero_options = options
        self.stage = stage

    def unmet_requirements(self, world: World) -> list[str]:
        if self.stage == 0 and self.zero_options.offload != "none":
            return ["ZeRO-Offload needs stage 1, 2 or 3; stage 0 has nothing to offload"]
        return [
            *reasons_not_run(self.zero_options.model_dump()),
            *self._unmet_adam(),
            *self._unmet_swapping(),
            *unmet_buffers(self.zero_options),
            *unmet_second_copy(world, self.zero_options),
        ]

    def _unmet_adam(self) -> list[str]:
        if not runs_cpu_adam(self.zero_options):
            return []
        return unmet_cpu_adam(self.zero_options) or unmet_build(CPU_ADAM)

    def _unmet_swapping(self) -> list[str]:
        if not swaps_into_files(self.zero_options):
            return []
        if self._engine_class() is not ZeroEngine:
            return [f"offload={self.zero_options.offload} runs under the native zero3"]
        return unmet_files(self.zero_options, self.stage) or unmet_build(ASYNC_IO)

    def _optimizer(
        self, build_optimizer: BuildOptimizer, model: nn.Module, precision: Precision
    ) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model.named_parameters())
        if not runs_cpu_adam(self.zero_options):
            return optimizer
        return cpu_adam(optimizer, fp32_states=precision != "bf16")

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        deepspeed = start_deepspeed(context)
        source = model_source(build_model)
        loading = self._loading(source.loading)
        model = source() if loading == "full" else source.skeleton()
        if context.precision.endswith("-mixed"):
            refuse_batch_norm(model, "DeepSpeed")
        count = parameter_count(model)
        config = self._configuration(model, count, context)
        if swaps_into_files(self.zero_options):
            lay_files(config, self.zero_options, model, context)
        if loading != "full":
            self._partition(deepspeed, model, source, config, context)
        groups = self._parallel_groups(deepspeed, model, context)
        optimizer = self._optimizer(build_optimizer, model, context.precision)
        # Stage 0 in low precision takes an optimizer step on zero gradients while it sets up: at
        # learning rate 0 that step moves nothing.
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        if swaps_into_files(self.zero_options):
            require_swappable(config, self.zero_options, optimizer, context)
        with hooked_without_gather(model) if loading != "full" else nullcontext():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=groups)
        if self.stage == 0:
            forget_dummy_step(optimizer)
        if self.stage in (1, 2):
            require_whole_blocks(engine.optimizer, context.optimizer, deepspeed.__version__)
        engine_class = SwappingEngine if swaps_into_files(self.zero_options) else self._engine_class()
        return engine_class(engine, context, config, self.stage, count, loading)

    def _loading(self, asked: Loading) -> Loading:
        """How initial weights reach this rank."""
        return asked if self.stage == 3 else "full"

    def _engine_class(self) -> type[ZeroEngine]:
        return ZeroEngine

    def _parallel_groups(self, deepspeed: ModuleType, model: nn.Module, context: SetupContext) -> Any:
        """DeepSpeed's account of groups of ranks ('mpu'), where they are not all data parallel."""
        return None

    def _configuration(self, model: nn.Module, count: int, context: SetupContext) -> dict[str, Any]:
        """DeepSpeed's, for a model of `count` parameters that is not partitioned yet."""
        blocks = block_classes(model) if gathers_blocks(self.zero_options) else ()
        return zero_config(self.stage, self.zero_options, context, count, blocks)

    def _partition(
        self,
        deepspeed: ModuleType,
        skeleton: nn.Module,
        source: ModelSource,
        config: dict[str, Any],
        context: SetupContext,
    ) -> None:
        """Partition the parameters one by one before `deepspeed.initialize` does so, and fill the pieces."""
        if context.precision != "fp32":  # else DeepSpeed keeps each parameter's dtype
            cast_parameters(skeleton, compute_dtype(context.precision))
        reserve_parameters(skeleton)
        deepspeed.zero.Init(module=skeleton, config_dict_or_path=config)
        # `initialize` leaves the buffers of a partitioned model where they are.
        device = this_device(context.world)
        for buffer in skeleton.buffers():
            buffer.data = buffer.data.to(device)
        fill_zero3(skeleton, source)


def start_deepspeed(context: SetupContext) -> ModuleType:
    """Import deepspeed and have it take over the process group. Raises Unsupported as `import_deepspeed`."""
    deepspeed = import_deepspeed(context.world, context.precision)
    deepspeed.init_distributed(
        dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
    )
    return deepspeed


def import_deepspeed(world: World, precision: Precision) -> ModuleType:
    """Import deepspeed with its accelerator pinned to the world's device and its logger silenced.

    Raises Unsupported where its accelerator lacks the precision.
    """
    if world.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    accelerator = get_accelerator()
    if precision == "fp16-mixed" and not accelerator.is_fp16_supported():
        raise Unsupported(
            f"DeepSpeed {deepspeed.__version__} says that {accelerator.device_name()} here has no fp16"
        )
    if world.device == "cpu":
        # On the CPU DeepSpeed would compile a shared-memory all-reduce (half a minute) that
        # bypasses torch.distributed, so that its traffic could not be counted.
        compatible: dict[str, Any] = deepspeed.ops.__compatible_ops__
        compatible["deepspeed_shm_comm"] = False
    return deepspeed
