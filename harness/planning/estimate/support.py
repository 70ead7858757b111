"""What a strategy cannot do, without loading its library; the adapters in `backends/` refuse the same."""

from __future__ import annotations

from harness.backends import tensor_plan
from harness.backends.base import BackendOptions, Precision, World
from harness.backends.extensions import runs_cpu_adam, unmet_cpu_adam, unmet_files
from harness.backends.hybrid import unmet_hybrid, unmet_second_copy
from harness.backends.not_run import reasons_not_run
from harness.backends.pipeline.cut import PIPELINED_MODELS, not_whole, why_not_cut, why_not_scheduled
from harness.backends.pipeline_options import PipelineOptions
from harness.backends.strategy import StrategyKind
from harness.backends.unsupported import Unsupported
from harness.planning.model import PlannedModel


def why_unsupported(
    strategy: StrategyKind, options: BackendOptions, precision: Precision, world: World
) -> str | None:
    """The first reason why a job cannot run under a strategy; None: it can."""
    try:
        options.mesh(world.world_size)
    except Unsupported as misfit:
        return str(misfit)
    offload = getattr(options, "offload", "none") != "none"
    if strategy.family == "single" and world.world_size > 1:
        return f"one process only, not {world.world_size}"
    if strategy.facts.has_replicas:
        unmet = unmet_hybrid(world, getattr(options, "shard_size", None))
        if unmet:
            return unmet[0]
    if unmet := [
        *reasons_not_run(options.model_dump()),
        *unmet_second_copy(world, options),
        *unmet_cpu_adam(options),
        *unmet_files(options, strategy.zero_stage or 0),
    ]:
        return unmet[0]
    if strategy.zero_stage is not None:
        return _zero(strategy.zero_stage, precision, offload=offload, own_adam=runs_cpu_adam(options))
    if world.device == "cpu" and strategy.through_accelerate and strategy.family != "ddp":
        return "accelerate ignores an FSDP plugin without an accelerator"
    if world.device == "cpu" and strategy.family == "fsdp1" and offload:
        return "CPUOffload of FSDP1 needs an accelerator to offload from"
    if precision == "fp16-mixed" and offload and strategy.family == "fsdp2" and world.device == "cuda":
        return "torch's gradient scaler reduces its flag on the CPU, which NCCL cannot reach"
    return None


def _zero(stage: int, precision: Precision, *, offload: bool, own_adam: bool) -> str | None:
    if stage == 0 and offload:
        return "stage 0 has nothing to offload"
    if precision == "bf16" and stage == 0:
        return "DeepSpeed always keeps fp32 masters at stage 0"
    if precision == "bf16" and offload and not own_adam:
        return "DeepSpeed offloads an optimizer without fp32 masters only if it is its own"
    return None


def why_not_divided(
    options: BackendOptions, model: PlannedModel, world_size: int, samples: int, precision: Precision
) -> str | None:
    """Why ranks cannot divide layers or blocks of a model; None: they can, or need not.

    samples: of a micro-step. The world is one that the options fit.
    """
    if isinstance(options, PipelineOptions):
        return why_not_staged(options, model, world_size, samples, precision)
    ranks = options.mesh(world_size).size("tensor")
    if ranks == 1:
        return None
    shapes = {tensor.name: tensor.shape for tensor in model.layout.parameters}
    return tensor_plan.why_not_cut(shapes, model.config, ranks)


def why_not_micro_batched(options: BackendOptions, world_size: int, samples: int) -> str | None:
    """Why a micro-step of so many samples cannot pass a pipeline; None: it can, or there is no pipeline.

    The world is one that the options fit.
    """
    if not isinstance(options, PipelineOptions):
        return None
    parts, ranks = options.parts(world_size), options.mesh(world_size).size("pipeline")
    reason = why_not_scheduled(options.schedule, micro_batches=parts, ranks=ranks)
    return reason or (not_whole(samples, parts) if samples % parts else None)


def why_not_staged(
    options: PipelineOptions, model: PlannedModel, world_size: int, samples: int, precision: Precision
) -> str | None:
    """Why a model cannot be cut into the stages of a pipeline, or its micro-step of so many samples."""
    if precision == "fp16-mixed":
        return "torch's gradient scaler looks at the gradients of one stage only"
    kind = str(model.config.get("model_type"))
    if kind not in PIPELINED_MODELS:
        return f"stages are cut for models of type {', '.join(PIPELINED_MODELS)}, not {kind}"
    ranks = options.mesh(world_size).size("pipeline")
    if (reason := why_not_micro_batched(options, world_size, samples)) is not None:
        return reason
    return why_not_cut(blocks=len(model.layout.blocks), ranks=ranks, stages=options.stages_on(ranks))
