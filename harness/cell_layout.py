"""How the ranks of a backend divide a global batch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends import registry
from harness.backends.options import SingleOptions
from harness.batch import BatchLayout, batch_layout, layout_over, with_micro_batch
from harness.errors import JobError
from harness.spec import TrainingSection


def data_size(label: str, world_size: int) -> int:
    """Ranks, or groups of ranks, with samples of their own."""
    return registry.mesh_of(label, world_size).data_size


def job_layout(labels: Sequence[str], world_size: int, training: TrainingSection) -> BatchLayout:
    """How all ranks cut the global batch of a job; if it does not divide, how groups that share samples do.

    With fewer samples than ranks only backends whose ranks share samples can run the job; the one with the
    most data ranks decides the cut. Raises JobError if none can.
    """
    try:
        return batch_layout(training, world_size)
    except JobError:
        if training.global_batch_size is None:
            raise
        for size in sorted({data_size(label, world_size) for label in labels} - {world_size}, reverse=True):
            try:
                return batch_layout(training, size)
            except JobError:
                continue
        raise


def layout_of(label: str, world_size: int, layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """The cut of the global batch: the job's over the data ranks, unless the label asks for its own."""
    _, options = registry.parse(label)
    if isinstance(options, SingleOptions):
        micro = options.micro_batch_size
        return layout if micro is None else with_micro_batch(layout, micro)
    return layout_over(data_size(label, world_size), layout, training)
