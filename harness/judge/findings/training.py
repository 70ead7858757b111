"""Runs whose settings, dtypes, updates, losses or weights are not their reference's, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations, pairwise, product
from typing import Any

from harness.backends.optimizer.kinds import LOW_BIT
from harness.backends.options import COST_ALONE
from harness.judge import quantities
from harness.judge.agreement import causes, parity
from harness.judge.distance import distance, movement
from harness.judge.effective import (
    GROUPS,
    SETTINGS,
    SettingDifference,
    altered_gradients,
    clipping_fits,
    norms_of_update,
    own_norms,
    reduce_dtypes,
)
from harness.judge.facts import metrics_in
from harness.judge.findings.finding import Finding, Rules, found
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import sentence, words
from harness.nested import grouped, totals
from harness.record import OddUpdatePart, Record
from harness.record.workload import batch_statistics

TRAINED = ("ok", "diverged")
BY_SETTING = {setting.name: setting.finding for setting in SETTINGS} | {GROUPS: "optimizer-differs"}
PROBE_TOLERANCE = 1e-6
"""Relative. Equal weights give equal losses up to the choice of kernels on another device."""


def settings(row: JudgedRun) -> Iterator[Finding]:
    """Settings in force that differ from the reference's, a replaced strategy, and skipped steps."""
    record, effective = row.record, row.record.backend.effective
    if record.status not in TRAINED or parity.is_repetition(record):
        return
    for difference in row.judgement.settings:
        if (kind := BY_SETTING.get(difference.setting)) is None:
            continue
        values: dict[str, Any] = {"reference": difference.reference, "given": difference.given}
        given, expected = difference.texts
        case = "setting" if kind in ("optimizer-differs", "compute-dtype-differs") else ""
        about: dict[str, Any] = {"differs": difference.differs, "when": difference.when}
        if difference.setting == GROUPS:  # both values of the first parameter, and how many more have others
            name, *others = difference.given
            given, expected = difference.given[name], difference.reference[name]
            about, case = about | {"name": name, "more": len(others)}, "groups"
        yield found(kind, row.cell, values, case, given=given, expected=expected, **about)
    asked = effective.requested_strategy if effective is not None else None
    if effective is not None and asked is not None and asked != effective.strategy:
        values = {"requested": asked, "effective": effective.strategy}
        yield found("strategy-differs", row.cell, values)
    if record.skipped_steps:
        values = {"skipped": record.skipped_steps, "steps": len(record.steps)}
        reference = row.reference.record if row.reference is not None else record
        own, others = sorted(parity.skipped(record)), sorted(parity.skipped(reference))
        alone = next((step for step in record.steps if step.step in own and step.step not in others), None)
        yield found(
            "skipped-steps", row.cell, values, "skipped", own=own, others=others, alone=alone,
            pair=causes.unlimited(reference, record),
            low=None if effective is None else effective.gradient_dtype == "float16",
            reduced_low=effective is not None and effective.reduce_dtype == "float16",
        )  # fmt: skip
    seen, scaled = record.observation, effective is not None and effective.loss_scale is not None
    if scaled and seen is not None and seen.base == "ddp":
        apart = (
            {"step": step.step, "ranks": [rank for rank, norm in norms.items() if norm is None]}
            for at, step in enumerate(record.steps)
            for norms in [{p.rank: p.gradient_norms[at] for p in record.ranks if len(p.gradient_norms) > at}]
            if len({norm is None for norm in norms.values()}) > 1
        )
        if (first := next(apart, None)) is not None:
            yield found("skipped-steps", row.cell, first, "apart")


def reductions(runs: Runs) -> Iterator[Finding]:
    """Runs that reduce in another dtype although others of the same job use fp32."""
    rows = [row for row in runs.rows if row.record.status in TRAINED]
    for job_id in dict.fromkeys(row.record.job_id for row in rows):
        dtypes = [(row, reduce_dtypes(row.record)) for row in rows if row.record.job_id == job_id]
        if any(given == ["float32"] for _, given in dtypes):
            yield from (
                found("reduce-dtype-differs", row.cell, {"given": given, "others": ["float32"]}, dtypes=given)
                for row, given in dtypes
                if given and given != ["float32"]
            )


def replicas(row: JudgedRun) -> Iterator[Finding]:
    """Ranks that should end with equal weights, or compute equal losses of one batch, and do not."""
    record = row.record
    groups = grouped(
        (rank.final_digest, rank.rank)
        for rank in (record.ranks if record.status in TRAINED else ())
        if rank.final_digest is not None
    )
    if len(groups) > 1:
        apart = record.final_weights.apart if record.final_weights else {}
        names = causes.unlike_copies(record)
        values = {"groups": list(groups.values())} | ({"parameters": names} if names else {})
        yield found(
            "replicas-differ", row.cell, values, "weights", where=causes.where(record, names),
            alone=len(names) == len(apart),
            begun=causes.are_unlike(part.initial_digest for part in record.ranks),
        )  # fmt: skip
        return
    losses = _probe_losses(record)
    if record.status not in TRAINED or batch_statistics(record) or causes.read_outside(record):
        return  # each rank evaluates with running statistics, or parts of weights, of its own
    if any(difference.kind == "samples-differ" for difference in row.judgement.not_same_job):
        return  # ranks that train other samples may also evaluate others
    if losses and max(losses.values()) - min(losses.values()) > PROBE_TOLERANCE * abs(max(losses.values())):
        buffers = record.layout.buffers if record.layout else []
        buffer = next((one.name for one in buffers if "float" in one.dtype), None)
        yield found("replicas-differ", row.cell, {"probe_losses": losses}, "losses", buffer=buffer)


def _probe_losses(record: Record) -> dict[int, float]:
    """Loss of one batch that is the same for all data ranks, by data rank; parts of it added up."""
    mesh = record.world.mesh
    return totals(
        (mesh.data_rank(rank.rank), rank.probe_loss)
        for rank in record.ranks
        if rank.probe_loss is not None and mesh.counts_loss(rank.rank)
    )


def cost_settings(runs: Runs) -> list[Finding]:
    """One per pair of cells that differ in settings of cost alone and lie further apart than rounding."""
    alike: dict[tuple[Any, ...], dict[str, list[JudgedRun]]] = {}
    for row in runs.rows:
        record = row.record
        if record.status != "ok" or record.resumed is not None:
            continue
        options = record.backend.options
        rest = {k: v for k, v in options.items() if k not in {*COST_ALONE, "row"} and v is not None}
        world = record.world
        place = (record.job_id, record.backend.name, world.world_size, world.nodes, world.preset)
        by_setting = alike.setdefault((*place, repr(sorted(rest.items(), key=str))), {})
        by_setting.setdefault(repr(settings_of(row)), []).append(row)
    told: dict[tuple[str, str], Finding] = {}
    sides = (pair for by_setting in alike.values() for pair in combinations(by_setting.values(), 2))
    for left, right in (pair for rows in sides for pair in product(*rows)):
        labels = left.label, right.label
        if labels not in told and (finding := _costs(left, right)) is not None:
            told[labels] = finding
    return list(told.values())


def settings_of(row: JudgedRun) -> dict[str, Any]:
    """Options in force that decide cost alone, as typed."""
    options = row.record.backend.options
    return {name: options[name] for name in sorted(COST_ALONE & options.keys()) if options[name] is not None}


def _costs(left: JudgedRun, right: JudgedRun) -> Finding | None:
    sides = [settings_of(row) for row in (left, right)]
    chance = parity.has_dropout(left.record) or parity.has_dropout(right.record)
    if chance or right.judgement.not_same_job:
        return None
    noise = left.noise or parity.measure_noise(left.record, ())
    beyond = (noise.band or noise.tight).exceeded(distance(left.record, right.record))
    if not beyond:
        return None
    names = sorted(sides[0].keys() | sides[1].keys())
    pairs = {name: tuple(side.get(name, "default") for side in sides) for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    what, (value, allowed) = next(iter(beyond.items()))
    return found(
        "cost-setting-changes-training", (left.label, right.label),
        {"settings": changed, "beyond": {name: list(pair) for name, pair in beyond.items()}},
        changed=[f"{name} {words(a)} against {words(b)}" for name, (a, b) in changed.items()],
        what=what, found=value, allowed=allowed,
    )  # fmt: skip


LOW = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
"""The low precision of a job; gradients may be in it or in fp32."""
OF_GRADIENTS = ("dtype of gradients", "dtype of accumulation")


def left_to_libraries(record: Record, difference: SettingDifference) -> bool:
    """Whether the job's precision lets a library choose this dtype: sound runs have it too."""
    dtypes = ("float32", LOW.get(record.job.training.precision))
    return difference.setting in OF_GRADIENTS and difference.given in dtypes


def precisions(row: JudgedRun) -> Iterator[Finding]:
    """Dtypes and loss scaling beyond what a library may choose within the job's precision."""
    if row.record.status not in TRAINED or parity.is_repetition(row.record):
        return
    for difference in row.judgement.settings:
        name, given, reference = difference.setting, difference.given, difference.reference
        kind = None
        if name == "dtype of computation":
            kind = "compute-dtype-differs"
        elif name in OF_GRADIENTS and not left_to_libraries(row.record, difference):
            kind = "gradient-dtype-differs"
        elif name == "loss scale" and (given == "none") != (reference == "none"):
            kind = "loss-scaling-differs"
        if kind is not None:
            yield found(
                kind, row.cell, {"reference": reference, "given": given},
                "setting" if kind == "compute-dtype-differs" else "",
                differs=difference.differs, given=words(given), expected=words(reference), when="",
            )  # fmt: skip


def layers(row: JudgedRun) -> Iterator[Finding]:
    """Layers that compute in another dtype than the reference's, where that is none of the job's precision,
    or wider than the job asks for."""
    if row.reference is None or parity.is_repetition(row.record):
        return
    mine, other = row.record.observed, row.reference.record.observed
    if mine is None or other is None or not mine.compute_dtype == other.compute_dtype is not None:
        return
    known = {name for names in other.products_otherwise.values() for name in names}
    low = LOW.get(row.record.job.training.precision)
    unlike = {
        dtype: names
        for dtype, of_dtype in mine.products_otherwise.items()
        if dtype != low and (names := [name for name in of_dtype if name not in known])
    }
    for dtype, names in [*unlike.items()][:1]:
        values = {"layers": unlike, "compute_dtype": mine.compute_dtype}
        yield found("compute-dtype-differs", row.cell, values, "layers", dtype=dtype, names=names)


SEEN = {
    "muon-on-parts": "matrices_in_parts", "fp8-not-applied": "wide_linears",
    "low-bit-states-wide": "wide_optimizer_bytes",
}  # fmt: skip
"""Kinds that one observed figure decides, unless it is 0; of wide states where the job asks for 8 bits."""


def seen(row: JudgedRun) -> Iterator[Finding]:
    optimizer = row.record.job.optimizer.kind
    for kind, name in SEEN.items() if row.record.observed else ():
        figure = getattr(row.record.observed, name)
        if figure and (kind != "low-bit-states-wide" or optimizer in LOW_BIT):
            yield found(kind, row.cell, {name: figure}, optimizer=optimizer)


def stale_weights(row: JudgedRun) -> Iterator[Finding]:
    """Weights in use that are not their masters, before or after the training."""
    ends = {"before the first step": row.record.initial_weights, "at the end": row.record.final_weights}
    stale = {
        when: {"stale": weights.stale_elements, "copied": weights.copied_elements or 0}
        for when, weights in ends.items()
        if weights is not None and weights.stale_elements
    }
    if stale:
        yield found("weights-in-use-stale", row.cell, stale, moments=stale)


SAME_RATE = 1e-3
"""Relative. How far a rate that is read from fp32 weights may lie from the one that moved them."""
LOW_BITS = {8.0: "bfloat16", 11.0: "float16"}
"""Dtypes by their significant bits."""


def odd_updates(row: JudgedRun, reference: Record | None = None) -> Iterator[Finding]:
    """The first update that is not what Adam makes of its gradient, where the reference's are."""
    reference = row.reference.record if row.reference is not None else reference
    seen = row.record.observation
    if seen is not None and len(seen.states_changed) > 1:
        yield found("update-altered", row.cell, {"steps": seen.states_changed}, "between")
    odd = causes.altered_updates(reference, row.record) if reference is not None else {}
    if not odd:
        return
    first = min(odd.values(), key=lambda part: part.step)
    ranks = [rank for rank, part in odd.items() if part.step == first.step]
    kinds = {odd[rank].kind for rank in ranks}
    if len(kinds) > 1:
        telling = [odd[rank] for rank in ranks if odd[rank].kind not in ("betas", "moments", "weights")]
        one = telling and len({part.kind for part in telling}) == 1
        first = telling[0] if one else OddUpdatePart(step=first.step, kind="weights")
    named = [odd[rank].parameters for rank in ranks]
    names = list(dict.fromkeys(name for of in named for name in of)) if all(named) else []
    values = {
        "step": first.step, "ranks": ranks, "kind": first.kind, "given": first.given, "due": first.due,
        "parameters": names,
    }  # fmt: skip
    decaying = set(row.record.layout.decaying) if row.record.layout and first.kind == "decay" else set(names)
    told = [name for name in names if (name in decaying) is (first.due != 0.0)]
    besides = [name for name in names if name not in told] if told else []
    alone = len(ranks) < row.record.world.world_size
    low = LOW_BITS.get(first.given or 0.0)
    rates = {step.step: step.learning_rate for step in row.record.steps}
    used, before = (first.given or 0.0) * rates.get(first.step, 0.0), rates.get(first.step - 1, 0.0)
    steps = [first.step, *first.later]
    gaps = [later - step for step, later in pairwise(steps)]
    regular = len(set(gaps)) == 1 and gaps[0] > 1
    yield found(
        "update-altered", row.cell, values, first.kind, alone=alone, low=low,
        later=gaps[0] if regular and len(gaps) > 1 else None,
        again=steps[1] if regular and len(gaps) == 1 else None,
        places=causes.where(row.record, told or names), besides=causes.where(row.record, besides),
        late=first.kind == "factor" and math.isclose(used, before, rel_tol=SAME_RATE),
    )  # fmt: skip


ONE_OF_THE_MODEL = ("loss", "norm", parity.MEAN_NORM, parity.MOMENT, "update", "weights")
"""What a run is judged by; anything else is a parameter's name."""
LOST_SHARE = 0.5
"""Weights that moved less than this share of the reference's distance lost updates."""


def diverged(row: JudgedRun) -> Iterator[Finding]:
    """A run that left its reference, with the cause; what shows beside a parity that hides it."""
    cause = None
    if row.judgement.parity == "diverged" and row.reference is not None and row.noise is not None:
        limits = row.noise.widest(row.record)
        unlike = [
            s.setting for s in row.judgement.settings
            if s.effect == "mathematics" and not left_to_libraries(row.record, s)
        ]  # fmt: skip
        shift = row.noise.norm_shift(row.record)
        cause = causes.explain_divergence(
            causes.Pair(row.reference.record, row.record, limits, unlike, shift)
        )
        figures = row.figures
        yield found(
            "diverged", row.cell,
            {metric.key: figures[metric.key] for metric in metrics_in("parity")}
            | {"exceeded": {name: rest for name, *rest in row.judgement.exceeded}},
            "run", measures=exceeded(row.judgement.exceeded),
            why=cause.text if cause.kind == "diverged" else f"see {cause.kind}",
            settings=[] if cause.kind == "update-differs" else unlike,
            measured=any(level.repetitions for level in row.noise.levels),
        )  # fmt: skip
        if cause.kind != "diverged":
            yield Finding(id=cause.kind, about=row.cell, text=cause.text, values=cause.values)
    if row.reference is not None and row.judgement.parity != "unjudged":
        wide = row.judgement.parity == "band"
        alone = causes.shown_alone(row.reference.record, row.record, wide=wide)
        if alone is not None and (cause is None or alone.kind != cause.kind):
            yield Finding(id=alone.kind, about=row.cell, text=alone.text, values=alone.values)
    index = causes.altered_step(row.record)
    if index is not None and row.judgement.parity not in ("diverged", "unjudged"):
        values = {
            "step": row.record.steps[index].step,
            "reported": causes.sums_of_step(row.record, index, "loss_sums"),
            "computed": causes.sums_of_step(row.record, index, "computed_loss_sums"),
        }
        kind = "loss-of-one-rank" if causes.of_one_rank(row.record, index) else "loss-altered"
        yield found(kind, row.cell, values, "agreeing")


def exceeded(measures: Sequence[tuple[str, float, float]]) -> list[str]:
    """What lies beyond its limit, in words: the model before single parameters, farthest first."""

    def rank(measure: tuple[str, float, float]) -> tuple[bool, float]:
        name, value, allowed = measure  # one that is not a number is beyond any
        times = value / allowed if allowed > 0 and not math.isnan(value) else math.inf
        return name in ONE_OF_THE_MODEL, times

    return [
        sentence(
            "diverged", name if name in ONE_OF_THE_MODEL else "parameter",
            name=name, found=value, allowed=allowed,
        )
        for name, value, allowed in sorted(measures, key=rank)[::-1]
    ]  # fmt: skip


def clipped_otherwise(row: JudgedRun) -> Iterator[Finding]:
    """Clipping that does not leave the norm that it was asked for: of a script, or of a backend whose
    updates hide it from parity."""
    record, seen = row.record, row.record.observation
    if seen is None and row.reference and row.judgement.parity in ("exact", "tight", "band"):
        if (altered := altered_gradients(record)) and not altered_gradients(row.reference.record):
            values = dict(zip(("step", "applied", "due"), altered, strict=True))
            yield found("clipped-otherwise", row.cell, values, "altered")
    if seen is not None and seen.clipped_within:
        yield found("clipped-otherwise", row.cell, {"updates": seen.clipped_within}, "within")
    effective = record.backend.effective
    limit = effective.gradient_clipping if effective is not None else None
    if seen is not None and seen.still_scaled > 1:
        yield found("clipped-otherwise", row.cell, {"updates": seen.still_scaled}, "still-scaled")
    if seen is not None and seen.clipped_empty:
        zero = (seen.base or "").startswith("zero")
        if not limit if zero else seen.clipped_empty >= len(record.steps):
            yield found("clipped-otherwise", row.cell, {"calls": seen.clipped_empty}, "empty", zero=zero)
    if seen is None or effective is None or limit is None or not 0 < limit < math.inf:
        return
    apart = norms_by_rank(record)
    if apart and seen.base is not None and seen.synchronised_at is None:
        if seen.base.startswith("fsdp") or record.backend.claim is not None:
            told = {"step": apart[0], "norms": apart[1], "limit": limit}
            yield found("clipped-otherwise", row.cell, told, "apart", shards=seen.base.startswith("fsdp"))
        return
    pairs = norms_of_update(record)
    values = {"limit": limit, "norm": pairs[0][1], "applied": pairs[0][2]} if pairs else {}
    if not pairs or clipping_fits(pairs, limit) or "deepspeed" in seen.frameworks:
        return
    if clipping_fits(pairs, None):
        if not clipping_fits(pairs[-1:], limit):  # that of the last step: it may have been larger before
            yield found("clipped-otherwise", row.cell, values, "after")
    elif (scale := effective.loss_scale) is not None and scale > 1:
        # A scaler halves its scale where gradients overflow.
        halved = [math.log2(min(norm, limit) / after / scale) if after else 0.5 for _, norm, after in pairs]
        if all(part <= HALVED and abs(part - round(part)) <= HALVED for part in halved):
            yield found("clipped-otherwise", row.cell, values | {"scale": scale}, "scaled")


HALVED = 0.015
"""Of a logarithm: 1 % of a norm, which clipping may leave."""
APART = 1e-3
"""Relative: norms of equal gradients are equal up to rounding."""


def norms_by_rank(record: Record) -> tuple[int, list[float]] | None:
    """The first step and its norms where ranks clipped by different ones in most steps."""
    of_steps = [(step.step, own_norms(record, at)) for at, step in enumerate(record.steps)]
    known = [(n, [norm for norm in of if norm is not None]) for n, of in of_steps if None not in of]
    apart = [(n, of) for n, of in known if of and max(of) - min(of) > APART * max(of)]
    return apart[0] if len(apart) > len(known) / 2 else None


def lost_updates(row: JudgedRun) -> Iterator[Finding]:
    """Find lost updates in any run whose optimizer updates weights of low precision, the reference too."""
    masters, seen = _masters(row.record), row.record.observation
    rates = [rate for of in seen.learning_rates for rate in of] if seen is not None else []
    if seen is not None and (still := seen.stood_still) and rates and all(rates):
        tensors = len(row.record.layout.parameters) if row.record.layout else len(still)
        values = {"parameters_that_stood_still": still}
        yield found("lost-updates", row.cell, values, still=still, tensors=tensors, far=False, dtypes=masters)
    if row.reference is None or masters in ([], ["float32"]):
        return
    sizes, there = movement(row.record), movement(row.reference.record)
    moved, expected = (sum(size**2 for size in of.values()) ** 0.5 for of in (sizes, there))
    layout, weights = row.record.layout, row.record.initial_weights
    idle = {*layout.frozen, *(layout.unreached or ())} if layout else set()
    sketch = (weights.sketch if weights else None) or {}
    # Beside 0 every update counts: no spacing rounds it away.
    still = [n for n, size in sizes.items() if size == 0 and n not in idle and sketch[n][0] > 0]
    if _masters(row.reference.record) == ["float32"]:  # else it loses the same updates
        still = [name for name in still if there.get(name) != 0]
    if expected and (moved < LOST_SHARE * expected or still):
        values = {"moved": moved, "reference": expected, "parameters_that_stood_still": still}
        yield found(
            "lost-updates", row.cell, values,
            still=still, tensors=len(sizes), far=moved < LOST_SHARE * expected, dtypes=masters,
        )  # fmt: skip


def _masters(record: Record) -> list[str]:
    return record.observed.master_dtypes if record.observed else []


def held_out(row: JudgedRun) -> Iterator[Finding]:
    """The first evaluation whose loss is not the reference's, of a run that agrees with it."""
    agrees = row.judgement.parity in ("exact", "tight", "band")
    if row.reference is None or row.noise is None or not agrees or batch_statistics(row.record):
        return
    limit = row.noise.widest(row.record).loss
    expected = {part.step: part for part in row.reference.record.eval}
    for given in row.record.eval:
        reference = expected.get(given.step)
        if reference is None or reference.loss is None:
            continue
        if given.loss is None or not abs(given.loss - reference.loss) <= limit:
            values = {
                "step": given.step, "reference": reference.loss, "given": given.loss, "allowed": limit,
                "target_tokens": [reference.target_tokens, given.target_tokens],
            }  # fmt: skip
            yield found("held-out-loss-differs", row.cell, values)
            return


def answers(row: JudgedRun) -> Iterator[Finding]:
    """Generated answers that differ by more than between repetitions, of a run that agrees."""
    if row.reference is None or row.judgement.parity not in ("exact", "tight"):
        return
    count = parity.differing_answers(row.reference.record, row.record)
    allowed = row.noise.answers if row.noise else None
    if count and allowed is not None and count > allowed:
        of = len(row.record.answers.given) if row.record.answers else 0
        values = {"differing": count, "between_repetitions": allowed, "answers": of}
        yield found("answers-differ", row.cell, values)


def idle(row: JudgedRun) -> Iterator[Finding]:
    """Where the run left its reference: a mean over ranks to which one adds nothing may be right."""
    missing = quantities.idle_on_some_ranks(row.record)
    if missing and row.judgement.parity == "diverged":
        first, *later = missing
        yield found(
            "idle-on-some-ranks", row.cell, {"missing": [asdict(one) for one in missing]},
            where=causes.where(row.record, first.names), ranks=first.ranks, step=first.step,
            more=sum(len(one.names) for one in later),
        )  # fmt: skip


def gradient_lost(row: JudgedRun) -> Iterator[Finding]:
    lost = quantities.gradient_lost(row.reference.record, row.record) if row.reference is not None else None
    if lost is not None:
        values = {"step": lost.step, "parameters": lost.names}
        yield found("gradient-lost", row.cell, values, where=causes.where(row.record, lost.names))


RULES = Rules(
    of_runs=(settings, precisions, replicas, diverged, lost_updates),
    of_cells=(
        clipped_otherwise, layers, seen, stale_weights, odd_updates, held_out, answers, idle,
        gradient_lost,
    ),
    of_all=(reductions, cost_settings),
)  # fmt: skip
