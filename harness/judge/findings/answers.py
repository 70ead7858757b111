"""Generated answers that differ from the reference's although the training agrees."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.noise import differing_answers
from harness.judge.repeats import Runs
from harness.judge.rows import Row

AGREES = ("exact", "tight")


def find(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _judge)


def _judge(row: Row) -> Finding | None:
    if row.reference is None or row.judgement.parity not in AGREES:
        return None
    count = differing_answers(row.reference.record, row.record)
    allowed = row.noise.answers if row.noise else None
    if not count or allowed is None or count <= allowed:
        return None
    of = len(row.record.answers.given) if row.record.answers else 0
    return Finding(
        id="answers-differ",
        about=row.cell,
        text=f"{count} of {of} answers differ from the reference's; {allowed} between its repetitions",
        values={"differing": count, "between_repetitions": allowed, "answers": of},
    )
