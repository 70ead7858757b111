"""Whether a run trained as its reference did: same job first, then losses and gradient norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from harness.record import Record

Parity = Literal["exact", "tight", "band", "diverged", "unjudged"]

# Reached on CPU ranks over gloo against one process, with the gradient norm accumulated in fp64:
# 1.7e-6 without clipping, 1.6e-5 where a library clips by its own fp32 norm.
TIGHT_WITHOUT_CLIPPING = 5e-6
TIGHT_WITH_CLIPPING = 5e-5
# Low precision: libraries round at different places. Per nat of loss; half the spacing of bf16 near 1
# is 3.9e-3, and runs of 20 steps were seen to differ by up to 2e-3.
BAND_LOW_PRECISION = 2e-2


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field in which two runs that should be one job differ."""

    field: str
    reference: Any
    given: Any


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How a run compares with its reference."""

    parity: Parity
    loss_difference: float | None
    """Largest absolute difference of a step's loss, nats per token."""
    norm_difference: float | None
    """Largest difference of a step's gradient norm, relative to the reference's."""
    not_same_job: tuple[Difference, ...] = ()
    reason: str | None = None


def tolerance(record: Record) -> float:
    """Largest loss difference that counts as tight for this job."""
    clipping = record.job["training"]["gradient_clipping"]
    return TIGHT_WITHOUT_CLIPPING if clipping is None else TIGHT_WITH_CLIPPING


def job_differences(reference: Record, record: Record) -> list[Difference]:
    """Fields that must agree before two runs may be compared, with both values."""
    found = []

    def check(field: str, left: Any, right: Any) -> None:
        if left != right:
            found.append(Difference(field=field, reference=left, given=right))

    check("job_id", reference.job_id, record.job_id)
    if reference.initial_weights and record.initial_weights:
        check(
            "parameter count",
            reference.initial_weights.parameter_count,
            record.initial_weights.parameter_count,
        )
        check("initial weights", reference.initial_weights.digest, record.initial_weights.digest)
    for left, right in zip(reference.steps, record.steps, strict=False):
        for field in ("ledger", "samples", "target_tokens", "learning_rate"):
            before = len(found)
            check(f"{field} of step {left.step}", getattr(left, field), getattr(right, field))
            if len(found) > before:
                return found
    asked, runs = reference.backend.effective, record.backend.effective
    if asked and runs:
        check("gradient clipping in force", asked["gradient_clipping"], runs["gradient_clipping"])
        check("optimizer constants", _constants(asked), _constants(runs))
    if record.status == "ok" and reference.status == "ok":
        check("number of steps", len(reference.steps), len(record.steps))
    return found


def _constants(effective: dict[str, Any]) -> list[str]:
    """Constants of the optimizer's groups, whatever their order."""
    return sorted({str(sorted(group.items())) for group in effective["optimizer_groups"]})


def judge(reference: Record | None, record: Record) -> Judgement:
    """Compare a run with the reference of its job; `unjudged` says why in `reason`."""

    def unjudged(reason: str, differences: list[Difference] | None = None) -> Judgement:
        return Judgement(
            parity="unjudged",
            loss_difference=None,
            norm_difference=None,
            not_same_job=tuple(differences or ()),
            reason=reason,
        )

    if record.status not in ("ok", "diverged"):
        return unjudged(f"the run is {record.status}")
    if reference is None or reference.status != "ok":
        return unjudged("the reference has no result")
    if _dropout(record):
        return unjudged("dropout is active: runs differ by chance")
    differences = job_differences(reference, record)
    if differences:
        first = differences[0]
        return unjudged(
            f"not the same job: {first.field} is {first.given}, the reference has {first.reference}",
            differences,
        )
    pairs = list(zip(reference.steps, record.steps, strict=False))
    losses = [(a.loss, b.loss) for a, b in pairs]
    norms = [(a.gradient_norm, b.gradient_norm) for a, b in pairs]
    loss = max((abs(a - b) for a, b in losses if a is not None and b is not None), default=None)
    norm = max((abs(a - b) / a for a, b in norms if a is not None and b is not None and a), default=None)
    return Judgement(
        parity=_level(reference, record, losses, norms, loss, norm),
        loss_difference=loss,
        norm_difference=norm,
    )


def _level(
    reference: Record,
    record: Record,
    losses: list[tuple[float | None, float | None]],
    norms: list[tuple[float | None, float | None]],
    loss: float | None,
    norm: float | None,
) -> Parity:
    if record.status == "diverged" or loss is None or any(b is None for _, b in losses):
        return "diverged"
    scaled = record.job["training"]["precision"] == "fp16-mixed"
    if not scaled and any(a is not None and b is None for a, b in norms):
        return "diverged"
    same_weights = (
        reference.final_weights is not None
        and record.final_weights is not None
        and reference.final_weights.digest == record.final_weights.digest
    )
    if same_weights and all(a == b for a, b in (*losses, *norms)):
        return "exact"
    limit = tolerance(record)
    # A wrong scale hides from the loss behind Adam and clipping, never from the norm.
    norm_limit = limit * 20
    if loss <= limit and (norm is None or norm <= norm_limit):
        return "tight"
    if record.job["training"]["precision"] != "fp32" and loss <= BAND_LOW_PRECISION:
        return "band" if norm is None or norm <= BAND_LOW_PRECISION * 10 else "diverged"
    return "diverged"


def _dropout(record: Record) -> bool:
    return record.job["model"]["dropout"] != 0.0
