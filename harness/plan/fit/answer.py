"""Searches the largest micro-batch and sequence, and says what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

from harness.judge.wording import counted, listed, percent
from harness.plan.fit.limit import Limit
from harness.plan.fit.search import (
    OutOfTrials,
    Sizes,
    Trial,
    fastest,
    largest_fitting,
    largest_predicted,
    smaller_ones,
    tied_with,
)
from harness.tell.formats import NOT_AVAILABLE, megabytes
from harness.tell.narrow import fitted


class Tries(Protocol):
    """What a search needs of a runner."""

    trials: list[Trial]
    limit: Limit

    def predicted_bytes(self, micro_batch_size: int, sequence_length: int | None = None) -> int | None:
        """Predicted peak of the allocator."""

    def bytes_between(
        self, micro_batch_size: int, sequence_length: int | None = None
    ) -> tuple[int, int] | None:
        """The least and the most that it can be where it is not predicted; None: that is not known."""

    def why_unpredicted(self) -> str | None:
        """Why no size has a prediction; None: they have."""

    def run(self, micro_batch_size: int, sequence_length: int | None = None) -> Trial:
        """Try one size."""


SIZE_OF: Mapping[str, Callable[[Trial], int]] = {
    "micro-batch": lambda trial: trial.micro_batch_size,
    "sequence": lambda trial: trial.sequence_length,
}
"""What is looked for, and where a trial has it."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of one search."""

    what: str
    """'micro-batch' or 'sequence'."""
    sizes: Sizes
    predicted: int | None
    """The largest size that the prediction lets fit; None: not even the smallest, or nothing is predicted."""
    unpredicted: str | None
    """Why nothing is."""
    predicted_between: tuple[int | None, int | None] | None = None
    """Then what fits if it needs the most that it can, and the least; None: neither is known."""
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
            "unpredicted": self.unpredicted,
            "predicted_between": self.predicted_between,
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
    return _find(
        "micro-batch", runner, sizes, asked, runner.predicted_bytes, runner.bytes_between, runner.run
    )


def find_sequence(runner: Tries, sizes: Sizes, micro_batch_size: int, asked: int) -> Found:
    """Search the sequence length at a micro-batch; `asked` is the job's own."""

    def predicted(length: int) -> int | None:
        return runner.predicted_bytes(micro_batch_size, length)

    def between(length: int) -> tuple[int, int] | None:
        return runner.bytes_between(micro_batch_size, length)

    def run(length: int) -> Trial:
        return runner.run(micro_batch_size, length)

    return _find("sequence", runner, sizes, asked, predicted, between, run)


def _find(
    what: str,
    runner: Tries,
    sizes: Sizes,
    asked: int | None,
    predicted_bytes: Callable[[int], int | None],
    between: Callable[[int], tuple[int, int] | None],
    run: Callable[[int], Trial],
) -> Found:
    size_of = SIZE_OF[what]
    limit, smallest = runner.limit.limit_bytes, sizes.sizes[0]
    is_predicted = predicted_bytes(smallest) is not None
    guess: int | None = None
    ends: tuple[int | None, int | None] | None = None

    def largest_of(bound: int) -> int | None:
        return largest_predicted(sizes.sizes, lambda size: (between(size) or (0, 0))[bound] <= limit)

    if is_predicted:
        guess = largest_predicted(sizes.sizes, lambda size: (predicted_bytes(size) or 0) <= limit)
    elif between(smallest) is not None:
        ends = largest_of(1), largest_of(0)
        asked = ends[0] or smallest
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
        unpredicted=None if is_predicted else runner.why_unpredicted(),
        predicted_between=ends,
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


HEADERS = (
    "micro-batch", "accumulation", "sequence", "predicted MB", "measured MB", "error", "status", "tokens/s",
    "retries",
)  # fmt: skip

LEAST_ERROR = 1e-4
"""Smaller errors of a prediction are only said to be smaller."""


def answer_lines(found: Found, limit: Limit) -> list[str]:
    """The largest, that of highest throughput, how good the prediction was, and what limits the answer."""
    lines = [_largest(found, limit)]
    if found.fastest is not None and found.timed > 1:
        lines.append(_fastest(found, found.fastest))
    lines.append(_predicted(found))
    if not found.complete:
        lines.append("not finished: raise --most-runs, which ended the search")
    if found.sizes.remark is not None:
        lines.append(f"note: {found.sizes.remark}")
    return lines


def trial_line(trial: Trial) -> str:
    """One trial as it ends."""
    measured = (
        f"peak {megabytes(trial.peak_bytes)} MB" if trial.peak_bytes is not None else "no peak measured"
    )
    rate = f", {trial.tokens_per_second:,.0f} tokens/s" if trial.tokens_per_second is not None else ""
    return (
        f"micro-batch {trial.micro_batch_size}, sequence {trial.sequence_length}: {trial.status}, "
        f"{measured} (predicted {megabytes(trial.predicted_bytes)} MB){rate}"
    )


def trial_table(trials: Sequence[Trial]) -> str:
    """All trials, by sequence and micro-batch."""
    ordered = sorted(trials, key=lambda trial: (trial.sequence_length, trial.micro_batch_size))
    rows = [
        [
            str(trial.micro_batch_size), str(trial.accumulation_steps), str(trial.sequence_length),
            megabytes(trial.predicted_bytes), megabytes(trial.peak_bytes), _signed(trial.prediction_error),
            trial.status,
            NOT_AVAILABLE if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f}",
            NOT_AVAILABLE if trial.num_alloc_retries is None else str(trial.num_alloc_retries),
        ]
        for trial in ordered
    ]  # fmt: skip
    return fitted(rows, HEADERS, alignments=dict.fromkeys(HEADERS, "right"))


def error_line(trials: Sequence[Trial]) -> str | None:
    """How far predicted peaks were from measured ones; None where nothing can be compared."""
    errors = [abs(error) for trial in trials if (error := trial.prediction_error) is not None]
    if not errors:
        return None
    return (
        f"error of the predicted peaks: mean {_small(mean(errors))}, worst {_small(max(errors))} "
        f"({counted(len(errors), 'run')})"
    )


def _largest(found: Found, limit: Limit) -> str:
    if found.largest is None:
        smallest = found.sizes.sizes[0]
        return (
            f"largest {found.what}: none. Even {smallest} runs out of memory with "
            f"{megabytes(limit.limit_bytes)} MB ({limit.origin}): "
            "try training.activation_checkpointing=true, a strategy that shards more, or offload=cpu"
        )
    size = SIZE_OF[found.what](found.largest)
    peak = found.largest.peak_bytes
    used = ""
    if peak is not None:
        share = percent(peak / limit.limit_bytes)
        used = f": peak {megabytes(peak)} MB of {megabytes(limit.limit_bytes)} MB ({share})"
    above = [larger for larger in found.sizes.sizes if larger > size][:1]
    if not found.complete and above and above[0] != found.too_large:
        text = f"largest {found.what}: at least {size} (ended after {counted(found.tried, 'run')}){used}"
        return text if found.too_large is None else f"{text}; {found.too_large} runs out of memory"
    return f"largest {found.what}: {size}{used}; {_next(found, size)}"


def _next(found: Found, size: int) -> str:
    """Why the largest is not larger."""
    if found.too_large is None:
        return found.sizes.bound
    sizes = found.sizes.sizes
    untried = f" ({found.sizes.bound})" if found.too_large - size > 1 and not isinstance(sizes, range) else ""
    return f"{found.too_large} runs out of memory{untried}"


def _fastest(found: Found, best: Trial) -> str:
    rate = f"{best.tokens_per_second or 0:,.0f} tokens/s"
    text = (
        f"highest throughput: {found.what} {SIZE_OF[found.what](best)}, {rate} "
        "(one run of each size, not tested against noise)"
    )
    others = [str(SIZE_OF[found.what](trial)) for trial in found.tied]
    if others:
        text += f"; timed steps overlap with those of {listed(others)}, so these are not ranked"
    if best.num_alloc_retries:
        text += f"; {counted(best.num_alloc_retries, 'allocator retry')}"
    return text


def _predicted(found: Found) -> str:
    largest = SIZE_OF[found.what](found.largest) if found.largest else None
    if found.predicted_between is not None:
        most, least = (end or "none" for end in found.predicted_between)
        return f"predicted: between {most} and {least}, measured: {largest or 'none'}; {found.unpredicted}"
    if found.unpredicted is not None:
        return f"predicted: {NOT_AVAILABLE}: {found.unpredicted}"
    if found.predicted is None:
        return "predicted: nothing fits" + ("" if largest is None else f", measured: {largest}")
    if found.predicted == largest:
        return f"predicted: {found.predicted}, as measured"
    return f"predicted: {found.predicted}, measured: {largest or 'none'}"


def _small(error: float) -> str:
    return percent(error) if error >= LEAST_ERROR else f"below {percent(LEAST_ERROR)}"


def _signed(error: float | None) -> str:
    return NOT_AVAILABLE if error is None else f"{error * 100:+.1f} %"
