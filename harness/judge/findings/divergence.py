"""Runs of the same job that left their reference, in training, held-out losses or answers, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.judge.agreement.causes import (
    altered_step,
    explain_divergence,
    moved_alone,
    of_one_rank,
    sums_of_step,
)
from harness.judge.agreement.noise import Noise, differing_answers
from harness.judge.agreement.parity import MEAN_NORM
from harness.judge.distance import movement
from harness.judge.facts import metrics_in
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import a_few, listed, percent
from harness.record import Record
from harness.record.workload import batch_statistics

MEASURES = {
    "norm": ("a gradient norm differs", ""),
    MEAN_NORM: ("gradient norms differ on average", ""),
    "update": ("the distance that the weights moved differs", ""),
    "weights": ("final weights differ", " of the distance that they moved"),
}
"""What a run is judged by, in words, and what its percent are of, unless of itself. The loss has a unit, and
anything else is a parameter's name."""
MOST_MEASURES = 3
"""The text names this many; the values hold all."""
LOST_SHARE = 0.5
"""Weights that moved less than this share of the reference's distance lost updates."""


def find_diverged(runs: Runs) -> list[Finding]:
    """Each run that diverged from its reference, with the cause if it was recognised."""
    found = []
    for row in runs.rows:
        if row.judgement.parity != "diverged" or row.reference is None or row.noise is None:
            continue
        values = row.figures
        limits = row.noise.widest(row.record)
        settings = [s.setting for s in row.judgement.settings if s.effect == "mathematics"]
        shift = row.noise.norm_shift(row.record)
        cause = explain_divergence(row.reference.record, row.record, limits, settings, shift)
        beyond = _exceeded(row.judgement.exceeded)
        why = cause.text if cause.kind == "diverged" else f"see {cause.kind}"
        found.append(
            Finding(
                id="diverged",
                about=row.cell,
                text=f"diverges from the reference ({beyond or 'a loss or norm became NaN or infinite'}); "
                f"{why}"
                + ("" if cause.kind == "update-differs" else _named(settings))
                + _measured(row.noise),
                values={metric.key: values[metric.key] for metric in metrics_in("parity")}
                | {"exceeded": {name: rest for name, *rest in row.judgement.exceeded}},
            )
        )
        if cause.kind != "diverged":
            found.append(
                Finding(
                    id=cause.kind,
                    about=row.cell,
                    text=cause.text,
                    values=cause.values,
                )
            )
    return found + _moved_alone(runs.rows, found) + _altered_losses(runs.rows) + _lost_updates(runs.rows)


def _moved_alone(rows: Sequence[JudgedRun], found: Sequence[Finding]) -> list[Finding]:
    """Of runs whose parity or another cause does not show it."""
    known = {(finding.about, finding.id) for finding in found}
    judged = [row for row in rows if row.reference is not None and row.judgement.parity != "unjudged"]
    causes = ((row, moved_alone(row.reference.record, row.record)) for row in judged if row.reference)
    return [
        Finding(id=cause.kind, about=row.cell, text=cause.text, values=cause.values)
        for row, cause in causes
        if cause is not None and (row.cell, cause.kind) not in known
    ]


def _exceeded(measures: Sequence[tuple[str, float, float]]) -> str:
    """What lies beyond its limit, the model before single parameters, farthest first."""
    ordered = sorted(measures, key=lambda m: (m[0] == "loss" or m[0] in MEASURES, _times_its_limit(m)))[::-1]
    return a_few([_measure(*measure) for measure in ordered], MOST_MEASURES, "; ")


def _times_its_limit(measure: tuple[str, float, float]) -> float:
    """How many times its limit a measure is; one that is not a number is beyond any."""
    _, found, allowed = measure
    return found / allowed if allowed > 0 and not math.isnan(found) else math.inf


def _measure(name: str, found: float, allowed: float) -> str:
    """'a gradient norm differs by 19 %, 0.00012 % allowed'."""
    if name == "loss":
        return f"a loss differs by {found:.1e} nats per token, {allowed:.1e} allowed"
    differs, of = MEASURES.get(name, (f"{name} differs", " of the distance it moved"))
    return f"{differs} by {percent(found)}{of}, {percent(allowed)} allowed"


def _measured(noise: Noise) -> str:
    """That nothing was, where the limits are lower bounds alone."""
    if any(level.repetitions for level in noise.levels):
        return ""
    return "; rounding was not measured, as compare.noise_runs does"


def _named(settings: list[str]) -> str:
    return f"; settings that differ: {', '.join(settings)}" if settings else ""


def _altered_losses(rows: Sequence[JudgedRun]) -> list[Finding]:
    """Of runs that stay within their level, where the reported losses alone would not show it."""
    found = []
    for row in rows:
        index = altered_step(row.record)
        if index is None or row.judgement.parity in ("diverged", "unjudged"):
            continue
        one = of_one_rank(row.record, index)
        values = {
            "step": row.record.steps[index].step,
            "reported": sums_of_step(row.record, index, "loss_sums"),
            "computed": sums_of_step(row.record, index, "computed_loss_sums"),
        }
        found.append(
            Finding(
                id="loss-of-one-rank" if one else "loss-altered",
                about=row.cell,
                text=(
                    "the loss is that of rank 0 only"
                    if one
                    else "ranks report another loss than they compute"
                )
                + f", from step {row.record.steps[index].step} on",
                values=values,
            )
        )
    return found


def _lost_updates(rows: Sequence[JudgedRun]) -> list[Finding]:
    """Of every run whose optimizer updates weights of low precision, the reference among them."""
    found = []
    for row in rows:
        masters = _masters(row.record)
        if row.reference is None or masters in ([], ["float32"]):
            continue
        sizes, there = movement(row.record), movement(row.reference.record)
        moved, expected = (sum(size**2 for size in of.values()) ** 0.5 for of in (sizes, there))
        still = [name for name, size in sizes.items() if size == 0 and _can_move(name, row.record)]
        if _masters(row.reference.record) == ["float32"]:  # else it loses the same updates
            still = [name for name in still if there.get(name) != 0]
        if expected and (moved < LOST_SHARE * expected or still):
            dtypes = listed(masters)
            one = f"{len(still)} of {len(sizes)} tensors, such as {still[0]}, never changed" if still else ""
            far = f"weights moved {moved / expected:.0%} as far as the reference's"
            parts = [one, far if moved < LOST_SHARE * expected else ""]
            found.append(
                Finding(
                    id="lost-updates",
                    about=row.cell,
                    text=f"{' and '.join(filter(None, parts))}: {dtypes} rounded updates away",
                    values={"moved": moved, "reference": expected, "parameters_that_stood_still": still},
                )
            )
    return found


def _masters(record: Record) -> list[str]:
    return record.observed.master_dtypes if record.observed else []


def _can_move(name: str, record: Record) -> bool:
    """Whether the job trains it, and its spacing can round an update away: beside 0 every update counts."""
    layout, weights = record.layout, record.initial_weights
    idle = {*layout.frozen, *(layout.unreached or ())} if layout else set()
    norm = weights.sketch[name][0] if weights is not None and weights.sketch is not None else 0.0
    return name not in idle and norm > 0


AGREES_IN_BAND = ("exact", "tight", "band")


def find_held_out(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _held_out)


def _held_out(row: JudgedRun) -> Finding | None:
    if row.reference is None or row.noise is None or row.judgement.parity not in AGREES_IN_BAND:
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


AGREES = ("exact", "tight")


def find_answers(runs: Runs) -> list[Finding]:
    """One finding per cell."""
    return of_cells(runs, _answers)


def _answers(row: JudgedRun) -> Finding | None:
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


def find_pipeline(runs: Runs) -> list[Finding]:
    """Each run of a pipeline whose ends hold different copies of a weight."""
    return [finding for row in runs.rows if (finding := _apart(row)) is not None]


def _apart(row: JudgedRun) -> Finding | None:
    record, effective = row.record, row.record.backend.effective
    shared = effective.details.get("tied_across_stages") if effective else None
    if not shared:
        return None
    digests: dict[int, set[str]] = {}
    for rank in record.ranks:
        if rank.final_digest is not None:
            digests.setdefault(record.world.mesh.data_rank(rank.rank), set()).add(rank.final_digest)
    if all(len(of_pipeline) < 2 for of_pipeline in digests.values()):
        return None
    return Finding(
        id="tied-weight-apart",
        about=row.cell,
        text=f"the first and the last stage hold different copies of {', '.join(shared)}, which the model "
        "ties: their gradients were not added up",
        values={"weights": list(shared)},
    )
