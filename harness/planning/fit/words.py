"""The answer of a search in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from harness.judge.wording import counted, listed, percent
from harness.planning.fit.answer import Found
from harness.planning.fit.limit import Limit
from harness.planning.fit.trial import Trial
from harness.tell.formats import NOT_AVAILABLE, megabytes
from harness.tell.narrow import fitted

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
        lines.append("not finished: the search ended for want of runs; raise --most-runs")
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
    size = size_of(found, found.largest)
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
        f"highest throughput: {found.what} {size_of(found, best)}, {rate} "
        "(one run of each size, not tested against noise)"
    )
    others = [str(size_of(found, trial)) for trial in found.tied]
    if others:
        text += f"; timed steps overlap with those of {listed(others)}, so these are not ranked"
    if best.num_alloc_retries:
        text += f"; {counted(best.num_alloc_retries, 'allocator retry')}"
    return text


def _predicted(found: Found) -> str:
    largest = size_of(found, found.largest) if found.largest else None
    if found.predicted is None:
        return "predicted: nothing fits" if largest is None else "predicted: no size"
    if found.predicted == largest:
        return f"predicted: {found.predicted}, as measured"
    return f"predicted: {found.predicted}, measured: {largest or 'none'}"


def size_of(found: Found, trial: Trial) -> int:
    """The size of a trial that the search was about."""
    return trial.micro_batch_size if found.what == "micro-batch" else trial.sequence_length


def _small(error: float) -> str:
    return percent(error) if error >= LEAST_ERROR else f"below {percent(LEAST_ERROR)}"


def _signed(error: float | None) -> str:
    return NOT_AVAILABLE if error is None else f"{error * 100:+.1f} %"
