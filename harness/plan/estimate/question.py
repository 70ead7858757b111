"""What is asked of an estimate, and the scenario of each of its rows, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.backends import registry
from harness.errors import HarnessError
from harness.job.batch import job_layout
from harness.job.experiment import Experiment
from harness.job.job import TrainingSection
from harness.launch.cells import canonical_label
from harness.plan.hardware import (
    Device,
    Fabric,
    TimeConstants,
    joined_by,
    of_network,
    require_context,
    with_training_defaults,
)
from harness.plan.model import PlannedModel
from harness.plan.scenario import job_model


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
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

    @property
    def gpus_per_node(self) -> int:
        """Of the largest world asked for: one that is smaller than a node fills none."""
        return min(self.ranks_per_node, max(self.world_sizes))

    @property
    def network(self) -> Fabric | None:
        """The one that an answer rests on; None: on none."""
        several = max(self.world_sizes) > self.ranks_per_node
        return self.fabric if several or not (self.fabric and self.fabric.assumed) else None


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
) -> EstimateRequest:
    """Check what is asked. `backends`: names with their options, or 'all' for every built-in one.

    Without any size of a batch, or with accumulation steps alone, the micro-batch is 1. `remarks`: what was
    chosen before. Raises HarnessError for an unknown or third party's backend, ranks that do not fill their
    nodes, a batch that does not divide, or too long a sequence.
    """
    asked, experiment = experiment, _with_batch(experiment)
    what = "none" if asked.training.accumulation_steps else "no batch"
    by_default = [] if experiment is asked else [f"training.micro_batch_size=1, since {what} is given"]
    on_cpu = experiment.runtime.device == "cpu"
    joined = fabric if on_cpu else joined_by(fabric, device, max(world_sizes))
    require_context(model, experiment)
    labels = dict.fromkeys(label for name in backends for label in _expand(name))
    for size in world_sizes:
        if size > ranks_per_node and size % ranks_per_node:
            raise HarnessError(
                f"{size} ranks do not fill nodes of {ranks_per_node} GPUs; give a multiple of "
                "--gpus-per-node, or change it"
            )
        job_layout(tuple(labels), size, experiment.training)
    found = EstimateRequest(
        model=model,
        experiment=experiment,
        labels=tuple(labels),
        world_sizes=tuple(world_sizes),
        ranks_per_node=ranks_per_node,
        device=device,
        fabric=joined,
        constants=constants,
        torch_device="cpu" if on_cpu else "cuda",
        names_all="all" in backends,
    )
    return replace(found, remarks=(*remarks, *by_default, *of_network(found.network)))


def asked_of(
    experiment: Experiment,
    model: str | None,
    *,
    device: Device | None,
    assignments: Sequence[str] = (),
    remarks: Sequence[str] = (),
    **where: Any,
) -> EstimateRequest:
    """What a command asks of a model by name, or of the job's; `where` as of `question`.

    A GPU brings the precision, sequence and preset of ordinary training where the job names none.
    assignments: of `--set`, some of which may change the configuration of a named model.
    """
    planned = job_model(experiment.job(), model, assignments)
    experiment, defaults = with_training_defaults(planned, experiment, device)
    return question(planned, experiment, device=device, remarks=(*remarks, *defaults), **where)


def _with_batch(experiment: Experiment) -> Experiment:
    training: TrainingSection = experiment.training
    if training.global_batch_size or training.micro_batch_size:
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
            f"backend '{entry.name}' is a third party's, without closed forms; "
            f"choose from {', '.join(registry.BUILT_IN)}"
        )
    return [label]
