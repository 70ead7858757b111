"""Held-out losses that differ from the reference's although the training agrees."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, Kind, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record.together import batch_statistics

AGREES = ("exact", "tight", "band")

KINDS = (
    Kind(
        id="held-out-loss-differs",
        title="The loss on held-out samples differs although the training agrees",
        cause="The evaluation computes something else than the training: samples of a batch are dropped or "
        "counted twice, ranks average their means, weights are not gathered or are those of before the last "
        "update, or layers stay in training mode.",
        confirm="`eval` of the record beside the reference's, step by step. The limit is that of a training "
        "loss of the same job. Layers that keep running statistics are left out: each rank evaluates with "
        "its own.",
        fix="Sum losses and target tokens over ranks and divide once; mask what pads the last batch; call "
        "`model.eval()`; gather weights on every rank (FSDP1: `summon_full_params`).",
    ),
)


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
