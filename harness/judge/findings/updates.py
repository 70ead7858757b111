"""Updates that are not what Adam makes of gradient, moments and constants, by rank and step."""

from __future__ import annotations

from harness.judge.agreement.causes import altered_updates
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import a_few, numbered
from harness.record import OddUpdatePart

OTHERWISE = {
    "stood-still": "weights stay as they were",
    "begun-anew": "its states begin anew, with update {given:g} where update {due:g} is due",
    "moments-lost": "the moments of before are lost",
    "moments": "second moments are not those that gradient and betas give",
    "weights": "something else than moments and constants moves weights",
    "beta2": "second moments follow beta2 {given:.4g} and not {due:g}",
    "decay": "weights decay by {given:.3g} and not {due:g}",
    "factor": "weights move {given:.4g} times as far as learning rate and moments say",
    "eps": "epsilon is {given:.3g} and not {due:g}",
    "eps-in-root": "epsilon stands within the root, not beside it",
    "bias-uncorrected": "moments are not corrected for the bias of their beginning",
    "first-uncorrected": "first moments are not corrected for the bias of their beginning",
    "second-uncorrected": "second moments are not corrected for the bias of their beginning",
    "moments-rounded": "moments are rounded to {low}",
    "weights-rounded": "weights are rounded to {low}",
}
LOW = {8.0: "bfloat16", 11.0: "float16"}
"""Dtypes by their significant bits."""


def find_altered_updates(runs: Runs) -> list[Finding]:
    """One finding per cell: its first update that came out otherwise, where the reference's did not."""
    return of_cells(runs, _altered)


def _altered(row: JudgedRun) -> Finding | None:
    odd = altered_updates(row.reference.record, row.record) if row.reference is not None else {}
    if not odd:
        return None
    first = min(odd.values(), key=lambda part: part.step)
    ranks = [rank for rank, part in odd.items() if part.step == first.step]
    if len({odd[rank].kind for rank in ranks}) > 1:
        first = OddUpdatePart(step=first.step, kind="weights")
    alone = len(ranks) < row.record.world.world_size
    where = f" on {numbered('rank', ranks)}" if alone else ""
    names = list(dict.fromkeys(name for rank in ranks for name in odd[rank].parameters))
    of = f", in {a_few(names)}" if names else ""
    return Finding(
        id="update-altered",
        about=row.cell,
        text=f"the update of step {first.step}{where} is not what Adam makes of its gradient: "
        f"{_words(first)}{of}",
        values={"step": first.step, "ranks": ranks, "kind": first.kind, "given": first.given}
        | {"due": first.due, "parameters": names},
    )


def _words(part: OddUpdatePart) -> str:
    return OTHERWISE[part.kind].format(given=part.given, due=part.due, low=LOW.get(part.given or 0.0))
