"""Generated answers that differ from the reference's although the training agrees."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, Kind, of_cells
from harness.judge.noise import differing_answers
from harness.judge.repeats import Runs
from harness.judge.rows import Row

AGREES = ("exact", "tight")

KINDS = (
    Kind(
        id="answers-differ",
        title="Generated answers differ although losses and weights agree",
        cause="Generation did not run on the weights that were trained: parameters were not gathered, only a "
        "part of the ranks took part, or a copy from before the last update was used.",
        confirm="`answers.given` of the record and of the reference's, sample by sample. The reference is "
        "repeated with another split of the batch: as many answers may differ as differ there, since two "
        "tokens can be equally likely.",
        fix="FSDP1: generate within `summon_full_params`, on every rank. ZeRO-3: call the engine's module on "
        "every rank, as often on each (`synced_gpus=True`). FSDP2: through the module, not its methods.",
    ),
)


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
