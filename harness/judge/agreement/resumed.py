"""A run that continued a checkpoint, aligned by step number with one that began elsewhere."""

from __future__ import annotations

from typing import Any

from harness.record import RankPart, Record

PER_STEP = (
    "step_seconds", "data_seconds", "sample_hashes", "samples", "target_tokens", "loss_sums",
    "gradient_norms", "batch_digests", "batch_hash_sums", "computed_loss_sums",
)  # fmt: skip
"""Fields of a rank that hold a value of every step, or of each of the first steps."""


def first_step(record: Record) -> int:
    """Number of the first step that the record holds, or would hold."""
    if record.steps:
        return record.steps[0].step
    return record.resumed.step if record.resumed is not None else 0


def aligned_runs(reference: Record, record: Record) -> tuple[Record, Record]:
    """The two from the first step that both took, as if both had begun with the reference's weights.

    Initial weights differ by nature if only one continued a checkpoint. What `record` loaded is compared
    elsewhere, with the digest of what was saved.
    """
    if reference.resumed == record.resumed:
        return reference, record
    begin = max(first_step(reference), first_step(record))
    left, right = from_step(reference, begin), from_step(record, begin)
    return left, right.model_copy(update={"initial_weights": reference.initial_weights})


def from_step(record: Record, step: int) -> Record:
    """The record without the steps before this one; initial weights stay those of its beginning."""
    skipped = step - first_step(record)
    if skipped <= 0:
        return record
    return record.model_copy(
        update={
            "steps": record.steps[skipped:],
            "ranks": [_rank_from(rank, skipped) for rank in record.ranks],
        }
    )


def _rank_from(rank: RankPart, skipped: int) -> RankPart:
    kept: dict[str, Any] = {name: getattr(rank, name)[skipped:] for name in PER_STEP}
    kept["phase_seconds"] = {phase: seconds[skipped:] for phase, seconds in rank.phase_seconds.items()}
    return rank.model_copy(update=kept)
