"""The arithmetic of a global batch: samples = ranks x micro-batch x accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.backends import registry
from harness.backends.options import SingleOptions
from harness.bounds import MOST_CELLS, MOST_RANKS, MOST_REPEATS
from harness.errors import HarnessError, JobError
from harness.job.job import DEFAULT_GLOBAL_BATCH_SIZE, Job, TrainingSection


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How a global batch is cut: samples per rank and forward pass, forward passes per step."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


def cut(ranks: int, *, total: int | None, micro: int | None, accumulation: int | None) -> BatchLayout:
    """Derive what is None of global batch, micro-batch and accumulation; of more than one accumulation is 1.

    Global batch or micro-batch must be given. Raises JobError where they do not fit.
    """
    given = {
        "ranks": ranks, "global_batch_size": total, "micro_batch_size": micro,
        "accumulation_steps": accumulation,
    }  # fmt: skip
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        total = ranks * micro * accumulation
    elif micro is None:
        accumulation = accumulation or 1
        micro = total // (ranks * accumulation)
    elif accumulation is None:
        accumulation = total // (ranks * micro) if micro else 0
    if not total or total != ranks * micro * accumulation:
        named = ", ".join(f"{name} {value}" for name, value in given.items() if value)
        raise JobError(
            f"{named} do not fit: training.global_batch_size (default "
            f"{DEFAULT_GLOBAL_BATCH_SIZE}) must equal ranks (or groups of ranks that share samples) x "
            "micro_batch_size x accumulation_steps; change one of them or the number of ranks"
        )
    return BatchLayout(global_batch_size=total, micro_batch_size=micro, accumulation_steps=accumulation)


def batch_layout(training: TrainingSection, world_size: int) -> BatchLayout:
    """How ranks cut the global batch: DEFAULT_GLOBAL_BATCH_SIZE unless it or the micro-batch is given."""
    total, micro = training.global_batch_size, training.micro_batch_size
    if total is None and micro is None:
        total = DEFAULT_GLOBAL_BATCH_SIZE
    return cut(world_size, total=total, micro=micro, accumulation=training.accumulation_steps)


def reference_layout(layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """Put the global batch on one rank: same micro-batch if one was given, else same accumulation."""
    return layout_over(1, layout, training)


def layout_over(data_ranks: int, layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """Divide the global batch over another number of data ranks.

    Same micro-batch if one was given, else same accumulation. A layout of that many is returned as it is.
    Raises JobError where the global batch does not divide.
    """
    total = layout.global_batch_size
    if total == data_ranks * layout.micro_batch_size * layout.accumulation_steps:
        return layout
    micro = training.micro_batch_size or total // data_ranks // layout.accumulation_steps
    return cut(data_ranks, total=total, micro=micro, accumulation=None)


def another_split(layout: BatchLayout) -> BatchLayout | None:
    """Split the global batch on one rank into smaller micro-batches, else larger; None: one sample."""
    micro = layout.micro_batch_size
    if micro > 1:
        return with_micro_batch(layout, micro // _smallest_factor(micro))
    if layout.accumulation_steps > 1:
        return with_micro_batch(layout, micro * _smallest_factor(layout.accumulation_steps))
    return None


def _smallest_factor(number: int) -> int:
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def with_micro_batch(layout: BatchLayout, micro_batch_size: int) -> BatchLayout:
    """Split the global batch on one rank into micro-batches of a given size. Raises JobError."""
    return cut(1, total=layout.global_batch_size, micro=micro_batch_size, accumulation=None)


def with_global_batch(job: Job, layout: BatchLayout) -> Job:
    """The job with its global batch resolved and the cut left out, so that its id ignores the cut."""
    training = job.training.model_copy(
        update={
            "global_batch_size": layout.global_batch_size,
            "micro_batch_size": None,
            "accumulation_steps": None,
        }
    )
    return job.model_copy(update={"training": training})


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


def cell_layout(label: str, world_size: int, layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """The cut of the global batch: the job's over the data ranks, unless the label asks for its own."""
    _, options = registry.parse(label)
    if isinstance(options, SingleOptions):
        micro = options.micro_batch_size
        return layout if micro is None else with_micro_batch(layout, micro)
    return layout_over(data_size(label, world_size), layout, training)


def require_plannable(backends: int, world_sizes: Sequence[int], repeats: int) -> None:
    """Raise HarnessError for a matrix that would take longer to plan than anybody waits."""
    if repeats > MOST_REPEATS:
        raise HarnessError(f"--repeats was given {repeats}; at most {MOST_REPEATS} are allowed")
    if max(world_sizes, default=1) > MOST_RANKS:
        raise HarnessError(f"{max(world_sizes)} ranks were asked for; at most {MOST_RANKS:,} are planned")
    if (cells := backends * len(world_sizes) * repeats) > MOST_CELLS:
        raise HarnessError(
            f"{backends} backends on {len(world_sizes)} numbers of ranks, {repeats} runs of each, are "
            f"{cells:,} cells; at most {MOST_CELLS:,} are planned"
        )
