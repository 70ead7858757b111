"""How the ranks of a backend divide a global batch."""

from __future__ import annotations

from harness.backends import registry
from harness.backends.options import SingleOptions
from harness.batch import BatchLayout, layout_over, with_micro_batch
from harness.spec import TrainingSection


def data_size(label: str, world_size: int) -> int:
    """Ranks, or groups of ranks, with samples of their own."""
    return registry.mesh_of(label, world_size).data_size


def layout_of(label: str, world_size: int, layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """The cut of the global batch: the job's over the data ranks, unless the label asks for its own."""
    _, options = registry.parse(label)
    if isinstance(options, SingleOptions):
        micro = options.micro_batch_size
        return layout if micro is None else with_micro_batch(layout, micro)
    return layout_over(data_size(label, world_size), layout, training)
