"""One size that was tried: what was predicted of it, and what its run measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.judge import measures
from harness.record import Record

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
