"""Which repetitions of the reference a comparison needs to measure what rounding changes."""

from __future__ import annotations

from collections.abc import Iterable

from harness.backends import registry
from harness.batch import BatchLayout, another_split
from harness.spec import Experiment


def tensor_sizes(labels: Iterable[str], world_size: int) -> set[int]:
    """Over how many ranks backends cut layers."""
    return {registry.mesh_of(label, world_size).size("tensor") for label in labels}


def noise_labels(layout: BatchLayout, experiment: Experiment, parts: Iterable[int] = ()) -> list[str]:
    """Repetitions of the reference that measure rounding: other orders of adding, at low precision others.

    `parts`: over how many ranks layers are cut, of which each rounds its part of a sum.
    """
    labels = []
    other = another_split(layout)
    if other is not None:
        options = f"micro_batch_size={other.micro_batch_size},norm=fp32,backward=reordered"
        labels.append(f"{registry.REFERENCE}:{options}")
    if experiment.training.precision != "fp32":
        labels.append(f"{registry.REFERENCE}:precision=fp32")
    if experiment.training.precision.endswith("-mixed"):
        labels.append(f"{registry.REFERENCE}:precision=cast")
        labels += [f"{registry.REFERENCE}:partial_sums={n}" for n in sorted(parts) if n > 1]
    if experiment.optimizer.rounds_states:
        labels.append(f"{registry.REFERENCE}:states=fp32")
    return labels
