"""What is trained and is not what one expects: labels of other tokens, a loss that the model adds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.backends.registry import REFERENCE
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import ModelLossPart, Record

ROUNDING = 2.0**-23
"""Of fp32, in which both are summed."""
LOW_ROUNDING = 2.0**-8
"""Of bfloat16, the widest spacing of a precision that runs have."""
OF_A_TERM = 8
"""Roundings of one target's cross entropy: a maximum, exponentials, their sum, a logarithm, a difference."""


def find(runs: Runs) -> list[Finding]:
    """Of each kind one finding per job, about the backends that trained it."""
    found = []
    for job_id in dict.fromkeys(row.record.job_id for row in runs.rows):
        rows = [row for row in runs.rows if row.record.job_id == job_id]
        if misplaced := [row for row in rows if _misplaced(row)]:
            found.append(_of_labels(misplaced))
        if adding := [row for row in rows if added_loss(row.record) is not None]:
            found.append(_of_loss(adding))
    return found


def _about(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(sorted({row.label for row in rows}))


def _of_labels(rows: Sequence[Row]) -> Finding:
    data, count = rows[0].record.data, _misplaced(rows[0])
    assert data is not None
    return Finding(
        id="labels-misplaced",
        about=_about(rows),
        text=f"{count:,} of {data.target_tokens:,} labels are not the token at their position: what is "
        "trained is no continuation of the text",
        values={"misplaced_labels": count, "target_tokens": data.target_tokens}
        | {"targets": rows[0].record.job.data.targets},
    )


def _misplaced(row: Row) -> int:
    return row.record.data.misplaced_labels if row.record.data else 0


def _of_loss(rows: Sequence[Row]) -> Finding:
    part = added_loss(rows[0].record)
    assert part is not None
    added = part.model - part.job
    return Finding(
        id="model-adds-loss",
        about=_about(rows),
        text=f"given labels the model returns {part.model:.4f}, the cross entropy that is trained is "
        f"{part.job:.4f}: what it adds ({added:+.4f}) is not trained",
        values={"model_loss": part.model, "job_loss": part.job, "targets": part.targets},
    )


def added_loss(record: Record) -> ModelLossPart | None:
    """The two losses where they differ by more than fp32 sums of the same terms can.

    A pairwise sum of n terms is off by at most log2(n) roundings (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2); a logarithm of a softmax adds a few, and either side may be off. Wrappers of
    a run in low precision also round what the model returns; the reference has none.
    """
    part = record.observed.model_loss if record.observed else None
    if part is None:
        return None
    relative = 2 * (math.log2(part.targets) + OF_A_TERM) * ROUNDING
    if record.backend.name != REFERENCE and record.job.training.precision != "fp32":
        relative = max(relative, 2 * LOW_ROUNDING)
    return part if abs(part.model - part.job) > relative * abs(part.job) else None
