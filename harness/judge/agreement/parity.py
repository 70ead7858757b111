"""Whether a run trained as its reference did: same job first, then how far it lies from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.forms.terms import STEP_PHASES
from harness.judge.agreement.job_equivalence import Difference, aligned_runs, job_differences
from harness.judge.agreement.noise import Noise, Tolerance, least_loss, measure_noise, skipped
from harness.judge.distance import Distance, StepPairs, aligned, distance, step_pairs
from harness.judge.effective import SettingDifference, setting_differences
from harness.judge.quantities import Run
from harness.judge.wording import percent
from harness.record import Record

MEAN_NORM = "mean_norm"
"""In what lies beyond its limit: the mean of the norms' differences from the repetition that rounds alike."""
MEASURED = {"norm": "gradient norms", "weights": "final weights"}
Parity = Literal["exact", "tight", "band", "diverged", "unjudged"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How a run compares with its reference."""

    parity: Parity
    loss_difference: float | None
    """Largest absolute difference of a step's loss, nats per token."""
    norm_difference: float | None
    """Largest difference of a step's gradient norm, relative to the reference's."""
    weights_difference: float | None = None
    """Distance of the final weights, in units of how far the reference's moved."""
    update_difference: float | None = None
    """Difference of the distance that the weights moved, relative to the reference's."""
    first_divergent_step: int | None = None
    """First step whose loss or norm lies beyond the level that precision allows."""
    exceeded: tuple[tuple[str, float, float], ...] = ()
    """What lies beyond that level: (loss, norm, mean_norm, update, weights or a parameter's name, found,
    allowed)."""
    settings: tuple[SettingDifference, ...] = ()
    """What runs otherwise than in the reference."""
    not_same_job: tuple[Difference, ...] = ()
    reason: str | None = None
    """Why it is unjudged."""


def judge(
    reference: Run | None,
    run: Run,
    noise: Noise | None = None,
    *,
    stand_in: Run | None = None,
    unjudged: str | None = None,
) -> Judgement:
    """Compare a run with the reference of its job; `noise` is that job's, else the lower bounds.

    Where the reference has no result, `stand_in` is the run that it must be the same job as: its losses
    are not judged then. `unjudged`: why the losses cannot be those of this reference.
    """
    record = run.record
    if record.status not in ("ok", "diverged"):
        return _unjudged(f"the run ended as {record.status}")
    has_reference = reference is not None and reference.record.status == "ok"
    expected_job = reference if has_reference else stand_in
    differences = job_differences(expected_job.record, record) if expected_job is not None else []
    if differences:
        first = differences[0]
        other = "the reference" if has_reference or expected_job is None else expected_job.backend
        return _unjudged(
            f"not the same job: {first.field} {'are' if first.plural else 'is'} {first.given}, {other} has "
            f"{first.reference}",
            differences,
        )
    if reference is None or not has_reference:
        reasons = reference.record.reasons if reference is not None else []
        return _unjudged(": ".join(["the reference has no result", *reasons[:1]]))
    expected, record = aligned_runs(reference.record, record)
    if has_dropout(expected) or has_dropout(record):
        return _unjudged("dropout is active: runs differ by chance")
    noise = noise or measure_noise(expected, ())
    both = step_pairs(expected, record) if run.record.resumed else aligned(reference.series, run.series)
    found = distance(expected, record, both)
    widest = noise.widest(record)
    level = _level(expected, record, found, noise)
    if unjudged is not None and level not in ("exact", "tight"):
        return _unjudged(unjudged)  # nothing agrees so well by chance
    if why := _without_yardstick(expected, record, found, noise, level):
        return _unjudged(why)
    exceeded = list(widest.exceeded(found).items())
    if level in ("tight", "band") and (shift := noise.norm_shift(record)) is not None:
        level = "diverged"
        exceeded.append((MEAN_NORM, (abs(shift.mean), shift.allowed)))
    if level == "diverged" and (own := _communicates_itself(record)):
        return _unjudged(
            f"the job's own code communicates between ranks ({own}), which one process cannot: "
            f"its first loss is {_first(record)}, {_first(expected)} in the reference"
        )
    return Judgement(
        parity=level,
        loss_difference=found.loss,
        norm_difference=found.norm,
        weights_difference=found.weights,
        update_difference=found.update,
        first_divergent_step=first_step_beyond(expected, both, widest),
        exceeded=tuple((name, *values) for name, values in exceeded),
        settings=tuple(setting_differences(expected, record)),
    )


def _without_yardstick(expected: Record, record: Record, found: Distance, noise: Noise, level: Parity) -> str:
    """Why repetitions of the reference are no measure of this run; '': they are."""
    least, measured = least_loss(record), any(one.repetitions for one in noise.levels)
    lost = least.exceeded(found) if least is not None else {}
    if level in ("tight", "band") and measured and lost:
        name, (value, most) = next(iter(lost.items()))
        return (
            f"{MEASURED[name]} differ by {percent(value)}, as may those of repetitions of the reference; "
            f"{percent(most)} would be enough for the gradient of a rank or a micro-step that is missing"
        )
    finite = record.status == "ok" and found.loss is not None
    alike = skipped(record) == skipped(expected) and lost
    if level == "diverged" and finite and noise.no_yardstick and not alike:
        return (
            f"the loss scaler of {', '.join(noise.no_yardstick)} skipped other steps than the reference's: "
            "rounding was not measured"
        )
    return ""


def _communicates_itself(record: Record) -> str:
    """What the job's own loss or model sends in a step; '': nothing."""
    own = {(row.op, row.phase) for row in record.comm if row.of_job and row.group_size > 1}
    return ", ".join(f"{op} in {phase}" for op, phase in sorted(own) if phase in STEP_PHASES)


def _first(record: Record) -> str:
    loss = record.steps[0].loss if record.steps else None
    return "not finite" if loss is None else f"{loss:.5g}"


def _unjudged(reason: str, differences: Sequence[Difference] = ()) -> Judgement:
    return Judgement(
        parity="unjudged",
        loss_difference=None,
        norm_difference=None,
        not_same_job=tuple(differences),
        reason=reason,
    )


def has_dropout(record: Record) -> bool:
    """Whether the job asks for dropout, or the live model has some."""
    live = record.observed.dropout if record.observed else None
    asked = record.job.model.dropout
    if asked is None and live is not None:  # the model's own, or that of an observed script
        return live > 0
    return asked != 0.0 or bool(live)


def _level(reference: Record, record: Record, found: Distance, noise: Noise) -> Parity:
    pairs = list(zip(reference.steps, record.steps, strict=False))
    if record.status == "diverged" or found.loss is None or any(b.loss is None for _, b in pairs):
        return "diverged"
    scaled = record.job.training.precision == "fp16-mixed"
    if not scaled and any(a.gradient_norm is not None and b.gradient_norm is None for a, b in pairs):
        return "diverged"
    left, right = reference.final_weights, record.final_weights
    same_weights = left is not None and right is not None and left.digest == right.digest
    if same_weights and all((a.loss, a.gradient_norm) == (b.loss, b.gradient_norm) for a, b in pairs):
        return "exact"
    if not noise.tight.exceeded(found):
        return "tight"
    if noise.band is not None and not noise.widest(record).exceeded(found):
        return "band"
    return "diverged"


def first_divergent_step(reference: Record, record: Record, limits: Tolerance) -> int | None:
    """First step whose loss or gradient norm lies beyond the limits; None: only weights do, or nothing."""
    return first_step_beyond(reference, step_pairs(reference, record), limits)


def first_step_beyond(reference: Record, both: StepPairs, limits: Tolerance) -> int | None:
    """The same, of two runs whose traces are known."""
    losses = ~np.isnan(both.losses[0]) & ~(both.loss_differences <= limits.loss)
    beyond = np.flatnonzero(losses | (both.norm_differences > limits.norm))
    return reference.steps[beyond[0]].step if beyond.size else None
