"""Records to comparison rows: each run beside the reference of its own job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from backends.registry import REFERENCE
from harness.compare import measures
from harness.compare.noise import Noise, is_repetition, is_variant, measure_noise
from harness.compare.parity import Judgement, judge
from harness.compare.same_job import job_differences
from harness.compare.states import expected_model_state_bytes
from harness.compare.volume import expected_sent_bytes_per_step
from harness.record import Record


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One run and how it compares with its reference; equal to itself only, which makes it a key."""

    record: Record
    judgement: Judgement
    reference: Record | None = None
    """The run that it was judged by."""
    noise: Noise | None = None
    """What counts as rounding in this job."""
    same_job_as: Record | None = None
    """The run that it must be the same job as; `judgement.not_same_job` holds where it is not."""

    @property
    def is_comparable(self) -> bool:
        """Whether its figures may stand beside those of the others."""
        return not self.judgement.not_same_job

    @property
    def is_of_another_job(self) -> bool:
        """Whether it asked for another job than the run that it was held against."""
        return self.same_job_as is not None and self.same_job_as.job_id != self.record.job_id

    def as_json(self) -> dict[str, Any]:
        """The row of `compare --json`: bytes per rank, rates over all ranks, None if not measured."""
        return dict(self._figures)

    @cached_property
    def timed_seconds(self) -> list[float]:
        """Duration of each timed step."""
        return measures.step_seconds(self.record)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        """Computed once: every section of a report asks for them."""
        record = self.record
        peaks = measures.peak_bytes(record)
        return {
            "backend": record.backend.label,
            "world_size": record.world.world_size,
            "repeat": record.repeat,
            "job_id": record.job_id,
            "status": record.status,
            "reason": reason(record),
            "run_id": record.run_id,
            "tokens_per_second": measures.rate(record, "tokens"),
            "samples_per_second": measures.rate(record, "samples"),
            "evaluation_samples_per_second": measures.evaluation_rate(record),
            "step_seconds": measures.median_step_seconds(record),
            "peak_bytes": max(peaks) if peaks else None,
            "model_state_bytes": measures.model_state_bytes(record),
            "expected_model_state_bytes": expected_model_state_bytes(record),
            "sent_bytes_per_step": measures.sent_bytes_per_step(record),
            "expected_sent_bytes_per_step": expected_sent_bytes_per_step(record),
            "textbook_sent_bytes_per_step": measures.textbook_bytes_per_step(record),
            "transport_sent_bytes_per_step": measures.transport_bytes_per_step(record),
            "max_loss_difference": self.judgement.loss_difference,
            "max_grad_norm_difference": self.judgement.norm_difference,
            "final_weights_difference": self.judgement.weights_difference,
            "update_difference": self.judgement.update_difference,
            "first_divergent_step": self.judgement.first_divergent_step,
            "parity": self.judgement.parity,
            "parity_reason": self.judgement.reason,
        }


def reason(record: Record) -> str | None:
    """Why a run has no whole result, in one line; None if it has."""
    if record.reasons:
        return "; ".join(record.reasons)
    if record.error is None:
        return None
    where = f" (rank {record.error.rank})" if record.error.rank is not None else ""
    message = record.error.message.strip() or "no message"
    return f"{record.error.kind}{where}: {message.splitlines()[0]}"


def make_rows(records: Iterable[Record]) -> list[Row]:
    """Judge each run by the reference run of the same job; order is kept.

    Repetitions of the reference in another way say what noise is and get no row beside the backends.
    """
    records = list(records)
    references: dict[str, Record] = {}
    for record in records:
        if record.backend.label == REFERENCE:
            known = references.get(record.job_id)
            if known is None or known.status != "ok":
                references[record.job_id] = record
    noises = {
        job_id: measure_noise(
            reference,
            [r for r in records if r.job_id == job_id and r is not reference and is_repetition(r)],
        )
        for job_id, reference in references.items()
    }
    whole = next((reference for reference in references.values() if reference.status == "ok"), None)
    stand_ins: dict[str, Record | None] = {}
    for record in records:
        reference = references.get(record.job_id)
        if record.job_id not in stand_ins and (reference is None or reference.status != "ok"):
            of_job = [r for r in records if r.job_id == record.job_id and r.status == "ok"]
            # A job without any reference beside one that has it is what does not belong here.
            alone = reference is None and whole is not None
            stand_ins[record.job_id] = whole if alone else most_agreed(of_job)
    return [
        Row(
            record=record,
            judgement=judge(
                references.get(record.job_id),
                record,
                noises.get(record.job_id),
                stand_in=stand_ins.get(record.job_id),
            ),
            reference=references.get(record.job_id),
            noise=noises.get(record.job_id),
            same_job_as=stand_ins.get(record.job_id, references.get(record.job_id)),
        )
        for record in records
        if not (is_variant(record) and record.job_id in references)
    ]


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Rows that may stand beside each other: those that are the same job as their reference."""
    return [row for row in rows if row.is_comparable]


def set_apart(rows: Iterable[Row]) -> list[Row]:
    """The others."""
    return [row for row in rows if not row.is_comparable]


def most_agreed(records: Sequence[Record]) -> Record | None:
    """Of runs without a reference the one that most others are the same job as, of equals the first.

    Each is held against the first of every group so far, not against all others: a matrix may be large.
    """
    groups: list[list[Record]] = []
    for record in records:
        own = next((group for group in groups if not job_differences(group[0], record)), None)
        if own is None:
            groups.append([record])
        else:
            own.append(record)
    return max(groups, key=len)[0] if groups else None
