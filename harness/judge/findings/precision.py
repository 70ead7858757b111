"""Dtypes and loss scaling in force that do not fit the precision of the job."""

from __future__ import annotations

from typing import Any

from harness.judge.effective import SettingDifference
from harness.judge.findings.finding import Finding
from harness.judge.noise import is_repetition
from harness.judge.repeats import Runs
from harness.judge.wording import words

LOW = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
"""The low precision of a job; gradients may be in it or in fp32."""
GRADIENTS = ("dtype of gradients", "dtype of accumulation")


def find(runs: Runs) -> list[Finding]:
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
