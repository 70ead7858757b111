"""Weights that forward passes use and that are not the masters."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, Kind, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row

KINDS = (
    Kind(
        id="weights-in-use-stale",
        title="Forward passes use other weights than the masters",
        cause="DeepSpeed keeps masters and the weights in use as two tensors, in fp32 too, and copies one to "
        "the other at the end of a step only. Masters that were set otherwise, as by "
        "`safe_set_full_fp32_param` or by loading a checkpoint by hand, are not in use before the next "
        "update: losses and the first gradient are those of the old weights.",
        confirm="`initial_weights.stale_elements` and `final_weights.stale_elements` of the record count "
        "weights in use that are not their master rounded to their dtype.",
        fix="Stages 1 and 2: call `engine.optimizer.update_lp_params()` after setting masters. Stage 3 has "
        "no such method: set the weights before `deepspeed.initialize`, or write them within "
        "`deepspeed.zero.GatheredParameters` as well.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judged)


def _judged(row: Row) -> Finding | None:
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
