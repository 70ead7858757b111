"""Held-out losses that differ from the reference's although the training agrees."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record.together import batch_statistics

AGREES = ("exact", "tight", "band")


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judge)


def _judge(row: Row) -> Finding | None:
    if row.reference is None or row.noise is None or row.judgement.parity not in AGREES:
        return None
    if batch_statistics(row.record):
        return None
    limit = row.noise.widest(row.record).loss
    expected = {part.step: part for part in row.reference.record.eval}
    pairs = [(expected[part.step], part) for part in row.record.eval if part.step in expected]
    for reference, given in pairs:
        if reference.loss is None or (given.loss is not None and abs(given.loss - reference.loss) <= limit):
            continue
        shown = "not finite" if given.loss is None else f"{given.loss:.6g}"
        return Finding(
            id="held-out-loss-differs",
            about=row.cell,
            text=f"the held-out loss after {given.step} steps is {shown}, the reference's "
            f"{reference.loss:.6g} from equal weights: the evaluation computes something else",
            values={
                "step": given.step, "reference": reference.loss, "given": given.loss, "allowed": limit,
                "target_tokens": [reference.target_tokens, given.target_tokens],
            },
        )  # fmt: skip
    return None
