"""The workload that a record describes, and which of its samples are computed together."""

from __future__ import annotations

from typing import Any

from harness.backends.registry import strategy_of
from harness.backends.strategy import StrategyKind
from harness.forms.activations import recomputed_until
from harness.forms.layout import DTYPE_BYTES, Layout, derived
from harness.forms.workload import Workload
from harness.job.job import Job
from harness.record.run import Record

NOT_CLAIMED = StrategyKind(family="not claimed")
"""In place of a third party's strategy that nothing is known of."""


def known_strategy(record: Record) -> StrategyKind | None:
    """What a built-in backend's name stands for, or what a third party's claims to be; None: nothing."""
    return strategy_of(record.backend.name) or record.backend.claim


def complex_parameters(layout: Layout) -> list[str]:
    return [tensor.name for tensor in layout.parameters if tensor.dtype.startswith("complex")]


@derived
def of_record(record: Record, rank: int = 0) -> Workload | None:
    """The workload of one rank of a run.

    None: the record has no model, one of dtypes of unknown size or with complex parameters, which libraries
    count as one number here and as two there, or is of a script that does not show its precision.
    """
    layout = record.layout
    if record.job.training.precision is None or layout is None:
        return None
    if any(t.dtype not in DTYPE_BYTES for t in (*layout.parameters, *layout.buffers)):
        return None
    if complex_parameters(layout):
        return None
    strategy, world = known_strategy(record) or NOT_CLAIMED, record.world
    # Where the strategy leaves the shard group open, the backend's mesh has it.
    whole = strategy.sharding != "none" and not strategy.facts.has_replicas
    shard_size = world.world_size if whole else record.backend.shard_size or world.world_size
    return of_job(
        record.job,
        layout=layout,
        architecture=record.model.architecture if record.model else None,
        strategy=strategy,
        world_size=world.world_size,
        mesh=world.mesh,
        rank=rank,
        shard_size=shard_size,
        ranks_per_node=world.ranks_per_node,
        preset=world.preset,
        micro_batch_size=world.micro_batch_size,
        accumulation_steps=world.accumulation_steps,
        original_parameters=(record.backend.native_config or {}).get("use_orig_params") is not False,
        device=world.device,
        transport=world.collectives,
        options=record.backend.options,
        steps=tuple(step.step for step in record.steps if step.window == "probed"),
        evaluation_every=record.job.evaluation.every_steps,
    )


def of_job(job: Job, *, layout: Layout, architecture: str | None, **world: Any) -> Workload:
    """The workload of a job for a model; `world`: every field of `Workload` that the job does not have."""
    training = job.training
    return Workload(
        layout=layout,
        precision=training.held_precision,
        sequence_length=job.data.sequence_length,
        gradient_clipping=training.gradient_clipping,
        activation_checkpointing=training.activation_checkpointing,
        recomputed_until=recomputed_until(architecture),
        **job.optimizer.for_closed_forms(world.get("options", {})),
        **world,
    )


RUNNING_MEAN = ".running_mean"


def batch_statistics(record: Record) -> list[str]:
    """Names of the layers of a run's model that keep running statistics, as BatchNorm does."""
    buffers = record.layout.buffers if record.layout else []
    return [
        tensor.name.removesuffix(RUNNING_MEAN) for tensor in buffers if tensor.name.endswith(RUNNING_MEAN)
    ]


def is_another_computation(record: Record, reference: Record) -> bool:
    """Whether a loss that is no sum over samples is taken over others at once than in the reference, or one
    that a count of passes changes after others."""
    if reference.split is not None and reference.split.counts_passes:
        ours, theirs = (one.world.accumulation_steps * micro_batches(one) for one in (record, reference))
        return ours != theirs
    return depends_on_split(reference) and samples_at_once(record) != samples_at_once(reference)


def depends_on_split(reference: Record) -> bool:
    """Whether what a job computes hangs on how its batches are cut; measured, or known of BatchNorm."""
    return reference.split.depends if reference.split is not None else bool(batch_statistics(reference))


def samples_at_once(record: Record) -> int:
    return record.world.micro_batch_size // micro_batches(record)


def micro_batches(record: Record) -> int:
    """Into which a pipeline cuts the batch of a micro-step; 1: it is none."""
    effective = record.backend.effective
    return int(effective.details.get("micro_batches") or 1) if effective else 1
