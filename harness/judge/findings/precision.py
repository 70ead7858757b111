"""Dtypes and loss scaling in force that do not fit the precision of the job."""

from __future__ import annotations

from typing import Any

from harness.judge.effective import SettingDifference
from harness.judge.findings.finding import Finding, Kind
from harness.judge.noise import is_repetition
from harness.judge.repeats import Runs
from harness.judge.wording import words

KINDS = (
    Kind(
        id="compute-dtype-differs",
        title="Dtype of the matrix products differs",
        cause="One backend computes in a lower precision than the other: autocast or the mixed precision "
        "policy is enabled in only one of them, or uses another dtype.",
        confirm="`effective.autocast_dtype` and `effective.parameter_dtype` of the records.",
        fix="torch: `autocast(dtype=...)` around every forward pass; FSDP "
        "`MixedPrecision(param_dtype=...)`; DeepSpeed `bf16.enabled`; Accelerate `mixed_precision=`.",
    ),
    Kind(
        id="gradient-dtype-differs",
        title="Gradients are stored or accumulated in a dtype that does not fit the precision of the job",
        cause="Gradients of an fp32 job were cast, or gradients of a mixed-precision job are in a different "
        "low precision. Accumulating micro-steps in bf16 drops what is below 1/256 of the sum.",
        confirm="`effective.gradient_dtype` and `effective.accumulation_dtype` of the records. At mixed "
        "precision libraries choose between fp32 and the low precision for gradients: that is not a "
        "finding, but the table of settings in force shows it.",
        fix='DeepSpeed `"data_types": {"grad_accum_dtype": "fp32"}`; FSDP `reduce_dtype=torch.float32`; '
        "torch: keep the parameters in fp32 and use autocast.",
    ),
    Kind(
        id="loss-scaling-differs",
        title="One run scales its loss and the other does not",
        cause="Only one of them uses a scaler for fp16: without it small gradients vanish in fp16; with it "
        "steps may be skipped.",
        confirm="`effective.loss_scale` of the records; None: no scaler. Different scales are not a finding: "
        "they are powers of two and cancel out.",
        fix="torch `GradScaler` and DeepSpeed `fp16.enabled` for every fp16 run; no scaler for bf16.",
    ),
)
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
