"""DeepSpeed ZeRO, stages 0 to 3, through `deepspeed.initialize` with a client AdamW."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from harness.backends import base
from harness.backends.libraries import facts
from harness.backends.model.blocks import block_classes, parameter_count, refuse_batch_norm, refuse_complex
from harness.backends.model.loading import fill_zero3, reserve_parameters, this_device
from harness.backends.model.precision import cast_parameters, compute_dtype
from harness.backends.model_source import Loading, ModelSource, model_source
from harness.backends.optimizer.groups import CONSTANTS, set_rates
from harness.backends.optimizer.kinds import why_not_narrowed
from harness.backends.options import ZeroOptions, gathers_blocks, unmet_second_copy
from harness.backends.zero.config import zero_config
from harness.backends.zero.engine import ZeroEngine, forget_dummy_step
from harness.backends.zero.extension_builds import unmet_build

if TYPE_CHECKING:
    from types import ModuleType


@contextmanager
def hooked_without_gather(model: nn.Module) -> Iterator[None]:
    """Around `deepspeed.initialize` of a model whose parameters are partitioned.

    `create_reduce_and_remove_grad_hooks` (stage3.py) gathers each parameter, attaches a hook, and frees it. A
    hook needs no values, so each parameter shows its shape without memory instead: a rank never holds a whole
    embedding, and gloo's copy of it, for that. Its own `all_gather` is back when this ends.
    """
    parameters: list[Any] = list(model.parameters())
    gathers = [parameter.all_gather for parameter in parameters]
    for parameter, gather in zip(parameters, gathers, strict=True):
        parameter.all_gather = partial(_show_shape, parameter, gather)
    try:
        yield
    finally:
        for parameter, gather in zip(parameters, gathers, strict=True):
            parameter.all_gather = gather


def _show_shape(parameter: Any, gather: Any, several: Sequence[Any] | None = None, **how: Any) -> Any:
    """Look gathered, with one value for all elements; several parameters are gathered as always."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if several is not None:
        return gather(several, **how)
    parameter.data = parameter.data.new_zeros(1).expand(parameter.ds_shape)
    parameter.ds_status = ZeroParamStatus.AVAILABLE
    return None


def require_whole_blocks(optimizer: Any, kind: str) -> None:
    """Raise Unsupported, on all ranks alike, where a parameter ends within a block of torchao's.

    optimizer: DeepSpeed's of stage 1 or 2.
    """
    partitions = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
    sizes = (([each.numel() for each in group], partition.numel()) for group, partition in partitions)
    if kind == "adamw-8bit" and (reason := why_not_narrowed(sizes)) is not None:
        raise base.Unsupported(reason)


def cpu_adam(optimizer: torch.optim.Optimizer, *, fp32_states: bool) -> torch.optim.Optimizer:
    """`DeepSpeedCPUAdam` over the same groups, its states in fp32 or in the parameters' dtype.

    Steps are counted as plain numbers. The kernel computes in fp32 whatever the parameters' dtype
    (`Adam_Optimizer::Step_1`, csrc/adam/cpu_adam_impl.cpp). Raises Unsupported unless `optimizer` is AdamW.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(optimizer, torch.optim.AdamW):
        raise base.Unsupported(f"adam=deepspeed replaces AdamW, not {type(optimizer).__name__}")
    # It knows neither `amsgrad` nor `maximize`; the keys say that they are false, as in the job's.
    kept = ("params", "lr", *CONSTANTS)
    groups = [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]
    first = groups[0]
    replacement: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups,
        lr=first["lr"],
        betas=first["betas"],
        eps=first["eps"],
        adamw_mode=True,
        fp32_optimizer_states=fp32_states,
    )
    return replacement


class ZeroBackend(base.Backend):
    """One ZeRO stage."""

    Options = ZeroOptions
    packages: ClassVar[tuple[str, ...]] = ("torch", "deepspeed")
    engine_class: ClassVar[type[ZeroEngine]] = ZeroEngine

    def __init__(self, options: base.BackendOptions, *, stage: int = 0) -> None:
        super().__init__(options)
        assert isinstance(options, ZeroOptions)
        self.zero_options = options
        self.stage = stage

    def unmet_requirements(self, world: base.World) -> list[str]:
        if self.stage == 0 and self.zero_options.offload != "none":
            return ["ZeRO-Offload needs stage 1, 2 or 3; stage 0 has nothing to offload"]
        return [*self._unmet_adam(), *unmet_second_copy(world, self.zero_options)]

    def _unmet_adam(self) -> list[str]:
        if not facts.runs_cpu_adam(self.zero_options):
            return []
        return facts.unmet_cpu_adam(self.zero_options) or unmet_build(facts.CPU_ADAM)

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        deepspeed = start_deepspeed(context)
        source = model_source(build_model)
        loading = self._loading(source.loading)
        model = source() if loading == "full" else source.skeleton()
        refuse_complex(model, "DeepSpeed")
        if context.precision.endswith("-mixed"):
            refuse_batch_norm(model, "DeepSpeed")
        count = parameter_count(model)
        config = self._configuration(model, count, context)
        if loading != "full":
            self._partition(deepspeed, model, source, config, context)
        groups = self._parallel_groups(deepspeed, model, context)
        optimizer = build_optimizer(model.named_parameters())
        if facts.runs_cpu_adam(self.zero_options):
            optimizer = cpu_adam(optimizer, fp32_states=context.precision != "bf16")
        # Stage 0 in low precision takes an optimizer step on zero gradients while it sets up: at
        # learning rate 0 that step moves nothing.
        set_rates(optimizer, 0.0)
        with hooked_without_gather(model) if loading != "full" else nullcontext():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=groups)
        if self.stage == 0:
            forget_dummy_step(optimizer)
        if self.stage in (1, 2):
            require_whole_blocks(engine.optimizer, context.optimizer)
        return self.engine_class(engine, context, config, self.stage, count, loading)

    def _loading(self, asked: Loading) -> Loading:
        """How initial weights reach this rank."""
        return asked if self.stage == 3 else "full"

    def _parallel_groups(self, deepspeed: ModuleType, model: nn.Module, context: base.SetupContext) -> Any:
        """DeepSpeed's account of groups of ranks ('mpu'), where they are not all data parallel."""
        return None

    def _configuration(self, model: nn.Module, count: int, context: base.SetupContext) -> dict[str, Any]:
        """DeepSpeed's, for a model of `count` parameters that is not partitioned yet."""
        blocks = block_classes(model) if gathers_blocks(self.zero_options) else ()
        return zero_config(self.stage, self.zero_options, context, count, blocks)

    def _partition(
        self,
        deepspeed: ModuleType,
        skeleton: nn.Module,
        source: ModelSource,
        config: dict[str, Any],
        context: base.SetupContext,
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


def start_deepspeed(context: base.SetupContext) -> ModuleType:
    """Import deepspeed and have it take over the process group. Raises Unsupported as `import_deepspeed`."""
    deepspeed = import_deepspeed(context.world, context.precision)
    deepspeed.init_distributed(
        dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
    )
    return deepspeed


def import_deepspeed(world: base.World, precision: base.Precision) -> ModuleType:
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
        raise base.Unsupported(
            f"DeepSpeed {deepspeed.__version__} says that {accelerator.device_name()} here has no fp16"
        )
    if world.device == "cpu":
        # On the CPU DeepSpeed would compile a shared-memory all-reduce (half a minute) that
        # bypasses torch.distributed, so that its traffic could not be counted.
        compatible: dict[str, Any] = deepspeed.ops.__compatible_ops__
        compatible["deepspeed_shm_comm"] = False
    return deepspeed


class PreparedZeroBackend(ZeroBackend):
    """One ZeRO stage; a library is given the model and the configuration."""

    library: ClassVar[str]
    """The package that prepares the engine."""

    def _unmet_adam(self) -> list[str]:
        if not facts.runs_cpu_adam(self.zero_options):
            return []
        return [
            f"{self.library} is given the job's AdamW; adam=deepspeed runs under the native ZeRO backends"
        ]

    @abstractmethod
    def _prepare(
        self,
        model: nn.Module,
        config: dict[str, Any],
        build_optimizer: base.BuildOptimizer,
        context: base.SetupContext,
    ) -> tuple[Callable[..., ZeroEngine], Any, dict[str, Any]]:
        """What makes the harness's engine around DeepSpeed's of the arguments of ZeroEngine; DeepSpeed's; the
        configuration as it was given it."""

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        deepspeed = start_deepspeed(context)
        # Before the library has the configuration: with one of stage 3 in force transformers builds
        # partitioned models and draws other initial weights.
        model = build_model()
        refuse_complex(model, "DeepSpeed")
        count = parameter_count(model)
        config = self._configuration(model, count, context)
        made, engine, handed_over = self._prepare(model, config, build_optimizer, context)
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise base.Unsupported(
                f"{self.library} {version(self.library)} prepared {type(engine).__name__}, not DeepSpeed"
            )
        return made(engine, context, handed_over, self.stage, count)
