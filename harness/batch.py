"""The arithmetic of a global batch: samples = ranks x micro-batch x accumulation."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import JobError
from harness.spec import DEFAULT_GLOBAL_BATCH_SIZE, Job, TrainingSection


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How a global batch is cut: samples per rank and forward pass, forward passes per step."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


def batch_layout(training: TrainingSection, world_size: int) -> BatchLayout:
    """Derive what is not given of global batch, micro-batch and accumulation.

    Two given: the third follows. Fewer: accumulation is 1, and the global batch
    DEFAULT_GLOBAL_BATCH_SIZE unless the micro-batch decides it. Raises JobError where they do not fit.
    """
    total = training.global_batch_size
    micro = training.micro_batch_size
    accumulation = training.accumulation_steps
    if total is None and micro is None:
        total = DEFAULT_GLOBAL_BATCH_SIZE
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        total = world_size * micro * accumulation
    elif micro is None:
        accumulation = accumulation or 1
        micro = _exact(total, world_size * accumulation, "micro_batch_size", training, world_size)
    elif accumulation is None:
        accumulation = _exact(total, world_size * micro, "accumulation_steps", training, world_size)
    if total != world_size * micro * accumulation:
        raise JobError(_mismatch(training, world_size))
    return BatchLayout(global_batch_size=total, micro_batch_size=micro, accumulation_steps=accumulation)


def reference_layout(layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """The same global batch on one rank: same micro-batch if one was given, else same accumulation."""
    return layout_over(1, layout, training)


def layout_over(data_ranks: int, layout: BatchLayout, training: TrainingSection) -> BatchLayout:
    """The same global batch over another number of data ranks.

    Same micro-batch if one was given, else same accumulation. A layout of that many is returned as it is.
    Raises JobError where the global batch does not divide.
    """
    total = layout.global_batch_size
    if total == data_ranks * layout.micro_batch_size * layout.accumulation_steps:
        return layout
    if training.micro_batch_size is not None:
        micro = training.micro_batch_size
    else:
        micro = total // data_ranks // layout.accumulation_steps
    accumulation = total // data_ranks // micro if micro else 0
    if total != data_ranks * micro * accumulation or not total:
        raise JobError(
            f"global_batch_size {total} does not divide over {data_ranks} ranks (or groups of ranks that "
            f"share samples) in micro-batches of {training.micro_batch_size or 'one size'}; change "
            "training.global_batch_size, training.micro_batch_size or how many ranks share samples"
        )
    return BatchLayout(global_batch_size=total, micro_batch_size=micro, accumulation_steps=accumulation)


def another_split(layout: BatchLayout) -> BatchLayout | None:
    """The same global batch on one rank in smaller micro-batches, else in larger; None: one sample."""
    micro = layout.micro_batch_size
    if micro > 1:
        return with_micro_batch(layout, micro // _smallest_factor(micro))
    if layout.accumulation_steps > 1:
        return with_micro_batch(layout, micro * _smallest_factor(layout.accumulation_steps))
    return None


def _smallest_factor(number: int) -> int:
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def with_micro_batch(layout: BatchLayout, micro_batch_size: int) -> BatchLayout:
    """The same global batch on one rank in micro-batches of a given size. Raises JobError."""
    total = layout.global_batch_size
    if total % micro_batch_size:
        raise JobError(
            f"micro_batch_size {micro_batch_size} does not divide the global batch of {total} samples; "
            "choose a divisor"
        )
    return BatchLayout(
        global_batch_size=total,
        micro_batch_size=micro_batch_size,
        accumulation_steps=total // micro_batch_size,
    )


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


def _exact(total: int, divisor: int, name: str, training: TrainingSection, world_size: int) -> int:
    quotient, rest = divmod(total, divisor)
    if rest or quotient == 0:
        raise JobError(_mismatch(training, world_size, missing=name))
    return quotient


def _mismatch(training: TrainingSection, world_size: int, missing: str | None = None) -> str:
    parts = [
        f"{name} {value}"
        for name in ("global_batch_size", "micro_batch_size", "accumulation_steps")
        if (value := getattr(training, name)) is not None
    ]
    if training.global_batch_size is None and training.micro_batch_size is None:
        parts.insert(0, f"global_batch_size {DEFAULT_GLOBAL_BATCH_SIZE} (default)")
    given = ", ".join(parts)
    problem = f"leaves no whole {missing}" if missing else "do not multiply to the global batch"
    return (
        f"{given} on {world_size} ranks {problem}: training.global_batch_size must equal ranks x "
        "micro_batch_size x accumulation_steps; change one of them or the number of ranks"
    )
