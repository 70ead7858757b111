"""Dtypes, loss scaling and widths in force that do not fit the precision of the job."""

from __future__ import annotations

from typing import Any

from harness.backends.optimizer.kinds import LOW_BIT
from harness.judge.agreement.noise import is_repetition
from harness.judge.effective import SettingDifference
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import a_few, words

LOW = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
"""The low precision of a job; gradients may be in it or in fp32."""
GRADIENTS = ("dtype of gradients", "dtype of accumulation")


def find_precisions(runs: Runs) -> list[Finding]:
    """Differences from the reference beyond what a library may choose within the job's precision."""
    return [
        Finding(
            id=kind,
            about=row.cell,
            text=f"{difference.differs}: {words(difference.given)} against "
            f"{words(difference.reference)} in the reference",
            values={"reference": difference.reference, "given": difference.given},
        )
        for row in runs.rows
        if row.record.status in ("ok", "diverged") and not is_repetition(row.record)
        for difference in row.judgement.settings
        if (kind := _kind(difference, row.record.job.training.precision)) is not None
    ]


def find_layers(runs: Runs) -> list[Finding]:
    """One finding per cell: layers that compute in another dtype than the reference's, where that is none
    of the job's precision, or wider than the job asks for."""
    return of_cells(runs, _layers)


def _layers(row: JudgedRun) -> Finding | None:
    if row.reference is None or is_repetition(row.record):
        return None
    mine, other = row.record.observed, row.reference.record.observed
    if mine is None or other is None or not mine.compute_dtype == other.compute_dtype is not None:
        return None
    known = {name for names in other.products_otherwise.values() for name in names}
    low = LOW.get(row.record.job.training.precision)
    found = {
        dtype: names
        for dtype, of_dtype in mine.products_otherwise.items()
        if dtype != low and (names := [name for name in of_dtype if name not in known])
    }
    if not found:
        return None
    dtype, names = next(iter(found.items()))
    return Finding(
        id="compute-dtype-differs",
        about=row.cell,
        text=f"dtype of computation differs in {a_few(names)}: {dtype} against {mine.compute_dtype} in the "
        "reference",
        values={"layers": found, "compute_dtype": mine.compute_dtype},
    )


def _kind(difference: SettingDifference, precision: str) -> str | None:
    if difference.setting == "dtype of computation":
        return "compute-dtype-differs"
    if difference.setting in GRADIENTS and difference.given not in ("float32", LOW.get(precision)):
        return "gradient-dtype-differs"
    if difference.setting == "loss scale" and _scales(difference.given) != _scales(difference.reference):
        return "loss-scaling-differs"
    return None


def _scales(scale: Any) -> bool:
    return scale != "none"


def find_fp8(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _fp8)


def _fp8(row: JudgedRun) -> Finding | None:
    observed = row.record.observed
    wide = observed.wide_linears if observed else None
    if not wide:
        return None
    return Finding(
        id="fp8-not-applied",
        about=row.cell,
        text=f"{wide} linear layers of the blocks do not multiply in fp8 although training.precision is fp8",
        values={"wide_linears": wide},
    )


WHY_WIDE = {
    "adamw-8bit": "what a rank updates is no multiple of 256 elements, or below 4,096",
    "adamw-8bit-bnb": "what a rank updates is below 4,096 elements",
}


def find_low_bit(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _low_bit)


def _low_bit(row: JudgedRun) -> Finding | None:
    observed = row.record.observed
    wide = observed.wide_optimizer_bytes if observed else None
    if row.record.job.optimizer.kind not in LOW_BIT or not wide:
        return None
    return Finding(
        id="low-bit-states-wide",
        about=row.cell,
        text=f"{wide:,} bytes of optimizer states are in full width although optimizer.kind is "
        f"{row.record.job.optimizer.kind}: {WHY_WIDE[row.record.job.optimizer.kind]}",
        values={"wide_optimizer_bytes": wide},
    )


def find_stale_weights(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _stale)


def _stale(row: JudgedRun) -> Finding | None:
    moments = {"before the first step": row.record.initial_weights, "at the end": row.record.final_weights}
    stale = {
        when: (weights.stale_elements, weights.copied_elements or 0)
        for when, weights in moments.items()
        if weights is not None and weights.stale_elements
    }
    if not stale:
        return None
    counts = " and ".join(f"{count:,} of {of:,} {when}" for when, (count, of) in stale.items())
    return Finding(
        id="weights-in-use-stale",
        about=row.cell,
        text=f"weights in use are not their masters, rounded to their dtype: {counts}",
        values={when: {"stale": count, "copied": of} for when, (count, of) in stale.items()},
    )
