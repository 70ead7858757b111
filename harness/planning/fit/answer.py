"""Searches the largest micro-batch and sequence, and says what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.planning.fit.limit import Limit
from harness.planning.fit.question import Sizes
from harness.planning.fit.search import OutOfTrials, largest_fitting, largest_predicted, smaller_ones
from harness.planning.fit.trial import Trial, fastest, tied_with


class Tries(Protocol):
    """What a search needs of a runner."""

    trials: list[Trial]
    limit: Limit

    def predicted_bytes(self, micro_batch_size: int, sequence_length: int | None = None) -> int | None:
        """Predicted peak of the allocator."""

    def run(self, micro_batch_size: int, sequence_length: int | None = None) -> Trial:
        """Try one size."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of one search."""

    what: str
    """'micro-batch' or 'sequence'."""
    sizes: Sizes
    predicted: int | None
    """The largest size that the prediction lets fit; None: not even the smallest, or nothing is predicted."""
    largest: Trial | None
    """None: not even the smallest size fits."""
    fastest: Trial | None
    tied: tuple[Trial, ...]
    """Trials that the timed steps do not tell from the fastest."""
    too_large: int | None
    """The smallest size that ran out of memory; None: no size did."""
    complete: bool
    """False: the search ended for want of runs."""
    tried: int
    """Sizes that ran."""
    timed: int
    """Of these, with a speed."""

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted": self.predicted,
            "largest": self.largest.as_json() if self.largest else None,
            "fastest": self.fastest.as_json() if self.fastest else None,
            "tied_with_fastest": [trial.run_id for trial in self.tied],
            "too_large": self.too_large,
            "complete": self.complete,
            "bound": self.sizes.bound,
            "remark": self.sizes.remark,
        }


def find_micro_batch(runner: Tries, sizes: Sizes, asked: int | None) -> Found:
    """Search the micro-batch; `asked` is the job's own, the first guess where nothing is predicted."""
    return _find("micro-batch", runner, sizes, asked, runner.predicted_bytes, runner.run, _micro_batch)


def find_sequence(runner: Tries, sizes: Sizes, micro_batch_size: int, asked: int) -> Found:
    """Search the sequence length at a micro-batch; `asked` is the job's own."""

    def predicted(length: int) -> int | None:
        return runner.predicted_bytes(micro_batch_size, length)

    def run(length: int) -> Trial:
        return runner.run(micro_batch_size, length)

    return _find("sequence", runner, sizes, asked, predicted, run, _sequence)


def _find(
    what: str,
    runner: Tries,
    sizes: Sizes,
    asked: int | None,
    predicted_bytes: Callable[[int], int | None],
    run: Callable[[int], Trial],
    size_of: Callable[[Trial], int],
) -> Found:
    limit, smallest = runner.limit.limit_bytes, sizes.sizes[0]
    is_predicted = predicted_bytes(smallest) is not None
    guess = None
    if is_predicted:
        guess = largest_predicted(sizes.sizes, lambda size: (predicted_bytes(size) or 0) <= limit)
    tried: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        tried[size] = run(size)
        return tried[size].fits

    def estimate() -> int | None:
        return _estimate(list(tried.values()), sizes.sizes, limit, size_of, predicted_bytes)

    complete = True
    try:
        largest = largest_fitting(
            sizes.sizes, guess or (smallest if is_predicted else asked or smallest), fits, estimate
        )
        for size in smaller_ones(sizes.sizes, largest) if largest is not None else ():
            fits(size)
    except OutOfTrials:
        complete = False
    ran = list(tried.values())
    best = fastest(ran)
    return Found(
        what=what,
        sizes=sizes,
        predicted=guess,
        largest=max((trial for trial in ran if trial.fits), key=size_of, default=None),
        fastest=best,
        tied=tuple(tied_with(best, ran)) if best else (),
        too_large=_too_large(ran, size_of),
        complete=complete,
        tried=len(ran),
        timed=sum(trial.tokens_per_second is not None for trial in ran),
    )


def _estimate(
    tried: Sequence[Trial],
    sizes: Sequence[int],
    limit: int,
    size_of: Callable[[Trial], int],
    predicted_bytes: Callable[[int], int | None],
) -> int | None:
    """Where the limit lies on the line through the two largest measured peaks. With one peak: where the
    prediction scaled to that peak reaches it, or a peak in proportion to the size if runs disprove that."""
    measured = sorted((size_of(trial), trial.peak_bytes) for trial in tried if trial.peak_bytes is not None)
    if len(measured) > 1:
        (size, peak), (larger, larger_peak) = measured[-2:]
        slope = (larger_peak - peak) / (larger - size)
        return int(larger + (limit - larger_peak) / slope) if slope > 0 else None
    if not measured:
        return None
    size, peak = measured[0]
    predicted, too_large = predicted_bytes(size), _too_large(tried, size_of)
    if predicted:
        guess = largest_predicted(sizes, lambda o: (predicted_bytes(o) or 0) * peak / predicted <= limit)
        if guess is not None and (too_large is None or guess < too_large):
            return guess
    return size * limit // peak


def _too_large(tried: Sequence[Trial], size_of: Callable[[Trial], int]) -> int | None:
    """The smallest size that ran out of memory."""
    return min((size_of(trial) for trial in tried if not trial.fits), default=None)


def _micro_batch(trial: Trial) -> int:
    return trial.micro_batch_size


def _sequence(trial: Trial) -> int:
    return trial.sequence_length
