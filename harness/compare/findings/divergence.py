"""Runs of the same job that did not train as their reference did."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.findings.finding import Finding, Kind, subject
from harness.compare.rows import Row

KINDS = (
    Kind(
        id="diverged",
        title="Losses or gradient norms leave the reference by more than rounding explains",
        cause="The backend computes something else: another gradient scale, other dtypes, a lost update.",
        confirm="Look at the first steps: a wrong scale shows in the gradient norm at once, other dtypes "
        "and lost updates show in the losses that follow.",
        fix="Compare the effective configuration with the reference's and remove the differences that "
        "change the mathematics.",
    ),
)


def find(rows: Sequence[Row]) -> list[Finding]:
    """One finding per run that left its reference."""
    found = []
    for row in rows:
        if row.judgement.parity == "diverged" and not row.judgement.not_same_job:
            values = row.as_json()
            found.append(
                Finding(
                    id="diverged",
                    backends=(row.record.backend.label,),
                    message=f"{subject(row)}: losses or gradient norms leave the reference",
                    values={key: values[key] for key in ("max_loss_difference", "max_grad_norm_difference")},
                )
            )
    return found
