"""What is asked of an estimate, and the scenario of each of its rows, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.backends import registry, tensor_plan
from harness.backends.base import BackendOptions, Precision, World
from harness.backends.explain import Unsupported
from harness.backends.extensions import runs_cpu_adam, unmet_cpu_adam, unmet_files
from harness.backends.hybrid import unmet_hybrid, unmet_second_copy
from harness.backends.options import PipelineOptions
from harness.backends.pipeline.cut import PIPELINED_MODELS, not_whole, why_not_cut, why_not_scheduled
from harness.backends.strategy import StrategyKind
from harness.errors import HarnessError, JobError
from harness.job.batch import BatchLayout, job_layout, layout_of, with_global_batch
from harness.job.experiment import Experiment
from harness.job.job import TrainingSection
from harness.job.pairs import why_refused as why_pair_refused
from harness.launch.cells import canonical_label
from harness.plan.adapters import why_refused
from harness.plan.constants import TimeConstants
from harness.plan.device import Device, Fabric, require_context
from harness.plan.model import PlannedModel
from harness.plan.scenario import Scenario


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


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a job, and where it may run."""

    model: PlannedModel
    experiment: Experiment
    labels: tuple[str, ...]
    """Backends with their options, canonical."""
    world_sizes: tuple[int, ...]
    ranks_per_node: int
    device: Device | None = None
    fabric: Fabric | None = None
    constants: TimeConstants | None = None
    """Of a calibration; None: published ones."""
    torch_device: str = "cuda"
    remarks: tuple[str, ...] = ()
    """What was chosen because nothing was given."""
    names_all: bool = False
    """Whether every built-in strategy is asked for, not some by their names."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A row before it is evaluated."""

    label: str
    world_size: int
    scenario: Scenario | None
    unsupported: str | None = None


def question(
    model: PlannedModel,
    experiment: Experiment,
    *,
    backends: Sequence[str],
    world_sizes: Sequence[int],
    ranks_per_node: int,
    device: Device | None = None,
    fabric: Fabric | None = None,
    constants: TimeConstants | None = None,
    remarks: Sequence[str] = (),
) -> Question:
    """Check what is asked. `backends`: names with their options, or 'all' for every built-in one.

    Without any size of a batch, the micro-batch is 1. `remarks`: what was chosen before. Raises HarnessError
    for an unknown or third party's backend, ranks that do not fill their nodes, a batch that does not divide,
    or too long a sequence.
    """
    asked, experiment = experiment, _with_batch(experiment)
    by_default = () if experiment is asked else ("training.micro_batch_size=1, since no batch is given",)
    require_context(model, experiment)
    labels = dict.fromkeys(label for name in backends for label in _expand(name))
    for size in world_sizes:
        if size > ranks_per_node and size % ranks_per_node:
            raise HarnessError(
                f"{size} ranks do not fill nodes of {ranks_per_node} GPUs; give a multiple of "
                "--gpus-per-node, or change it"
            )
        job_layout(tuple(labels), size, experiment.training)
    return Question(
        model=model,
        experiment=experiment,
        labels=tuple(labels),
        world_sizes=tuple(world_sizes),
        ranks_per_node=ranks_per_node,
        device=device,
        fabric=fabric,
        constants=constants,
        torch_device="cpu" if experiment.runtime.device == "cpu" else "cuda",
        remarks=(*remarks, *by_default),
        names_all="all" in backends,
    )


def candidates(asked: Question) -> Iterator[Candidate]:
    """The rows, by world size and then by backend."""
    for world_size in asked.world_sizes:
        for label in asked.labels:
            yield _candidate(asked, label, world_size)


def _candidate(asked: Question, label: str, world_size: int) -> Candidate:
    entry, options = registry.parse(label)
    assert entry.strategy is not None
    per_node = min(asked.ranks_per_node, world_size)
    world = World.planned(world_size, per_node, asked.torch_device)
    training, job = asked.experiment.training, asked.experiment.job()
    precision = training.held_precision
    layout: BatchLayout | None = None
    reason = why_unsupported(entry.strategy, options, precision, world) or why_refused(job, entry.strategy)
    reason = reason or why_pair_refused(label, world_size, job)
    try:
        layout = layout_of(label, world_size, job_layout([label], world_size, training), training)
    except JobError as misfit:
        reason = reason or str(misfit)
    if layout is not None and reason is None:
        reason = why_not_divided(options, asked.model, world_size, layout.micro_batch_size, precision)
    if layout is None or reason is not None:
        return Candidate(label=label, world_size=world_size, scenario=None, unsupported=reason)
    scenario = Scenario.of(
        label,
        asked.model,
        with_global_batch(job, layout),
        world_size=world_size,
        ranks_per_node=per_node,
        preset=asked.experiment.runtime.preset,
        micro_batch_size=layout.micro_batch_size,
        accumulation_steps=layout.accumulation_steps,
        torch_device=asked.torch_device,
        device=asked.device,
        fabric=asked.fabric,
        constants=asked.constants,
    )
    return Candidate(label=label, world_size=world_size, scenario=scenario)


def _with_batch(experiment: Experiment) -> Experiment:
    training: TrainingSection = experiment.training
    if any((training.global_batch_size, training.micro_batch_size, training.accumulation_steps)):
        return experiment
    one = training.model_copy(update={"micro_batch_size": 1})
    return experiment.model_copy(update={"training": one})


def _expand(name: str) -> Iterable[str]:
    if name == "all":
        return [entry for entry in registry.BUILT_IN if entry != registry.REFERENCE]
    label = canonical_label(name)
    entry, _ = registry.parse(label)
    if entry.strategy is None:
        raise HarnessError(
            f"backend '{entry.name}' is a third party's, which no closed form here knows; "
            f"choose from {', '.join(registry.BUILT_IN)}"
        )
    return [label]
