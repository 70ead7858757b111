"""What is searched: the job of a trial, the sizes to try, and what they mean for the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.backends.pipeline.cut import not_whole
from harness.errors import HarnessError
from harness.judge.wording import ranks
from harness.planning.fit.search import divisors
from harness.spec import Experiment

LARGEST_MICRO_BATCH = 2**16
SEQUENCE_PARTS = 64
"""Sequences are tried in steps of the model's context over this number."""
SMALLEST_SEQUENCE_STEP = 8
WARMUP_STEPS = 2
"""From the third step on every step does as all later ones (`theory.workload.ORDINARY_STEP`)."""
PROBED_STEPS = 1
TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Ascending sizes to try."""

    sizes: Sequence[int]
    bound: str
    """Why there are no larger ones."""
    remark: str | None = None
    """What trying them does to the job; None: nothing."""


def micro_batches(experiment: Experiment, world_size: int, *, parts: int = 1) -> Sizes:
    """Micro-batches to try: those that leave the global batch as it is, or all if the job has none.

    parts: a pipeline's, which a micro-batch must be a multiple of. Raises HarnessError where the job leaves
    no choice.
    """
    training = experiment.training
    total = training.global_batch_size
    if total is None:
        times = training.accumulation_steps or 1
        return Sizes(
            sizes=range(parts, LARGEST_MICRO_BATCH + 1, parts),
            bound=f"no larger micro-batch than {LARGEST_MICRO_BATCH} is tried",
            remark="the job gives no training.global_batch_size, so the global batch grows with the "
            f"micro-batch ({ranks(world_size)} x micro-batch x {times})",
        )
    if training.accumulation_steps is not None:
        raise HarnessError(
            f"training.global_batch_size {total} and accumulation_steps {training.accumulation_steps} leave "
            "no choice of the micro-batch; leave one of them out"
        )
    if total % world_size:
        raise HarnessError(
            f"training.global_batch_size {total} does not divide among {world_size} ranks; change one of them"
        )
    own = total // world_size
    if own % parts:
        raise HarnessError(not_whole(own, parts))
    return Sizes(
        sizes=[size for size in divisors(own) if size % parts == 0],
        bound=f"the global batch of {total} has {own} samples for each of {world_size} ranks",
    )


def sequences(context: int | None, asked: int) -> Sizes:
    """Sequence lengths to try, up to the model's context; `asked` is the job's, tried where it is no step."""
    longest = context or asked * SEQUENCE_PARTS
    step = max(SMALLEST_SEQUENCE_STEP, longest // SEQUENCE_PARTS)
    lengths = sorted({*range(step, longest + 1, step), min(asked, longest), longest})
    bound = f"the model's context has {context} positions" if context else "the model names no context"
    return Sizes(sizes=lengths, bound=bound, remark="the tokens of a step grow with the sequence")


def trial_experiment(
    experiment: Experiment,
    *,
    micro_batch_size: int,
    sequence_length: int | None = None,
    limit_bytes: int | None = None,
) -> Experiment:
    """The job for one trial: few steps, memory probed in one of them, nothing else measured."""
    document: dict[str, Any] = experiment.model_dump(mode="python")
    document["training"] |= {
        "micro_batch_size": micro_batch_size,
        "steps": WARMUP_STEPS + PROBED_STEPS + TIMED_STEPS,
        "epochs": None,
    }
    document["evaluation"] |= {"every_steps": None, "answer_tokens": None}
    if sequence_length is not None:
        document["data"] |= {"sequence_length": sequence_length}
    document["measure"] = {
        "warmup_steps": WARMUP_STEPS,
        "probed_steps": PROBED_STEPS,
        "traced_steps": 0,
        "cooldown_steps": 0,
        "weight_digests": False,
    }
    if limit_bytes is not None:
        document["runtime"] |= {"memory_limit": limit_bytes}
    return Experiment.model_validate(document)
