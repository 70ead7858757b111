"""Finds the largest of some ascending sizes that fits, with few trials; knows nothing of runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.backends.pipeline.cut import not_whole
from harness.errors import HarnessError
from harness.job.experiment import Experiment
from harness.judge.quantities import measures
from harness.judge.wording import ranks
from harness.record import Record

STRIDE = 32
"""The first step away from the first guess: this part of it. Predictions are right within some percent."""
GROWTH = 4
"""Each further step over the one before."""
MOST_ON_ONE_SIDE = 2
"""Estimates in a row; then the gap is halved once, should they be wrong."""
FRACTIONS = (2, 4)
"""Parts of the largest size that are tried as well: the largest is not always the fastest."""


class OutOfTrials(Exception):
    """The next trial would be one too many."""


def largest_fitting(
    sizes: Sequence[int],
    first: int,
    fits: Callable[[int], bool],
    estimate: Callable[[], int | None] = lambda: None,
) -> int | None:
    """The largest of `sizes` for which `fits` holds; None: not even the first.

    sizes: ascending; whatever is below one that fits fits too. first: the guess to begin with; a right one
    costs two trials. `estimate` says where the largest may be, from what was tried so far; None: it cannot.
    `fits` may raise OutOfTrials.
    """
    low, high = -1, len(sizes)  # fits, does not fit
    probe = min(max(_position(sizes, first), 0), high - 1)
    stride = max(1, probe // STRIDE)
    on_one_side = 0
    while high - low > 1:
        is_fitting = fits(sizes[probe])
        low, high = (probe, high) if is_fitting else (low, probe)
        guess = estimate() if low >= 0 and on_one_side < MOST_ON_ONE_SIDE else None
        if guess is not None:
            probe = _position(sizes, guess)
            on_one_side += 1
        elif low >= 0 and high < len(sizes):
            probe = (low + high) // 2
            on_one_side = 0
        else:
            probe = low + stride if is_fitting else high - stride
            stride *= GROWTH
            on_one_side = 0
        probe = min(max(probe, low + 1), high - 1)
    return sizes[low] if low >= 0 else None


def _position(sizes: Sequence[int], size: int) -> int:
    """Index of the largest that is not above `size`; -1: there is none."""
    return bisect_right(sizes, size) - 1


def largest_predicted(
    sizes: Sequence[int], fits: Callable[[int], bool], likely: Collection[int] = ()
) -> int | None:
    """The largest of `sizes` that a prediction lets fit, by halving; None: not even the first.

    The last is asked first: as it leaves no accumulation, it may need less than smaller ones. likely:
    larger ones than the largest of these that fits are looked for.
    """
    if fits(sizes[-1]):
        return sizes[-1]
    first = next((sizes.index(size) for size in sorted(likely, reverse=True) if fits(size)), 0)
    if not fits(sizes[first]):
        return None
    index = bisect_left(range(first, len(sizes)), True, key=lambda position: not fits(sizes[position]))
    return sizes[first + index - 1]


def smaller_ones(sizes: Sequence[int], largest: int) -> list[int]:
    """Sizes near fixed fractions of the largest, in falling order."""
    found = (sizes[max(0, _position(sizes, largest // part))] for part in FRACTIONS)
    return list(dict.fromkeys(size for size in found if size < largest))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


FITTING = ("ok", "diverged")
"""Statuses of runs whose memory sufficed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch and sequence, and the run that tried them."""

    micro_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    sequence_length: int
    predicted_bytes: int | None
    """Peak of the allocator; None: nothing is known of the backend's strategy."""
    status: str
    """Of the record."""
    peak_bytes: int | None
    """Largest peak of the allocator of any rank in the probed steps; None: not measured."""
    tokens_per_second: float | None
    """Over the timed steps, all ranks together."""
    slowest_tokens_per_second: float | None
    """Of the slowest timed step."""
    fastest_tokens_per_second: float | None
    num_alloc_retries: int | None
    """CUDA: of the rank with most of them, in the whole run."""
    run_id: str

    @property
    def fits(self) -> bool:
        return self.status in FITTING

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted_bytes is None or not self.peak_bytes:
            return None
        return self.predicted_bytes / self.peak_bytes - 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"prediction_error": self.prediction_error}


def trial_of(record: Record, predicted_bytes: int | None) -> Trial:
    """What a run says of the size that it tried."""
    world = record.world
    rates = [step.tokens / step.seconds for step in measures.timed_steps(record) if step.tokens is not None]
    retries = [rank.num_alloc_retries for rank in record.ranks if rank.num_alloc_retries is not None]
    return Trial(
        micro_batch_size=world.micro_batch_size,
        accumulation_steps=world.accumulation_steps,
        global_batch_size=world.micro_batch_size * world.accumulation_steps * world.data_size,
        sequence_length=record.job.data.sequence_length,
        predicted_bytes=predicted_bytes,
        status=record.status,
        peak_bytes=max(measures.peak_bytes(record), default=None),
        tokens_per_second=measures.rate(record, "tokens"),
        slowest_tokens_per_second=min(rates, default=None),
        fastest_tokens_per_second=max(rates, default=None),
        num_alloc_retries=max(retries, default=None),
        run_id=record.run_id,
    )


def fastest(trials: list[Trial]) -> Trial | None:
    """The trial with most tokens per second; of equals the smaller, which leaves more memory free."""
    timed = [trial for trial in trials if trial.fits and trial.tokens_per_second is not None]
    return min(timed, key=lambda t: (-(t.tokens_per_second or 0.0), t.micro_batch_size), default=None)


def tied_with(best: Trial, trials: list[Trial]) -> list[Trial]:
    """Trials whose timed steps overlap with those of the fastest: these runs do not tell them apart."""
    return [
        trial
        for trial in trials
        if trial is not best
        and trial.fits
        and trial.fastest_tokens_per_second is not None
        and best.slowest_tokens_per_second is not None
        and trial.fastest_tokens_per_second >= best.slowest_tokens_per_second
    ]


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
