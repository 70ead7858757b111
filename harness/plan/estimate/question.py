"""What is asked of an estimate, and the scenario of each of its rows, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.backends import registry
from harness.backends.base import World
from harness.errors import HarnessError, JobError
from harness.job.batch import BatchLayout, job_layout, layout_of, with_global_batch
from harness.job.experiment import Experiment
from harness.job.job import TrainingSection
from harness.launch.cells import canonical_label
from harness.plan.constants import TimeConstants
from harness.plan.device import Device, Fabric, require_context
from harness.plan.model import PlannedModel
from harness.plan.scenario import Scenario, why_not_planned


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
    per_node = min(asked.ranks_per_node, world_size)
    training, job = asked.experiment.training, asked.experiment.job()
    layout: BatchLayout | None = None
    misfit = None
    try:
        layout = layout_of(label, world_size, job_layout([label], world_size, training), training)
    except JobError as error:
        misfit = str(error)
    world = World.planned(world_size, per_node, asked.torch_device)
    reason = why_not_planned(label, job, world, layout.micro_batch_size if layout else None, asked.model)
    reason = reason or misfit
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
