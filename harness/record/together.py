"""Which samples of a run are computed together, and whether its loss hangs on that."""

from __future__ import annotations

from harness.record.run import Record

RUNNING_MEAN = ".running_mean"


def batch_statistics(record: Record) -> list[str]:
    """Names of the layers of a run's model that keep running statistics, as BatchNorm does."""
    buffers = record.layout.buffers if record.layout else []
    return [
        tensor.name.removesuffix(RUNNING_MEAN) for tensor in buffers if tensor.name.endswith(RUNNING_MEAN)
    ]


def is_another_computation(record: Record, reference: Record) -> bool:
    """Whether a loss that is no sum over samples is taken over others at once than in the reference."""
    return depends_on_split(reference) and samples_at_once(record) != samples_at_once(reference)


def depends_on_split(reference: Record) -> bool:
    """Whether what a job computes hangs on how its batches are cut; measured, or known of BatchNorm."""
    return reference.split.depends if reference.split is not None else bool(batch_statistics(reference))


def samples_at_once(record: Record) -> int:
    """Samples of one forward pass."""
    return record.world.micro_batch_size // micro_batches(record)


def micro_batches(record: Record) -> int:
    """Into which a pipeline cuts the batch of a micro-step; 1: it is none."""
    effective = record.backend.effective
    return int(effective.details.get("micro_batches") or 1) if effective else 1
