"""Whether a run trained as its reference did: same job first, then how far it lies from it.

How much of that rounding explains is measured by repeating the reference in other ways. With another split
of the same batch, and another order of sums in the backward pass, it adds the same numbers in another
order: what then differs is rounding. At a mixed precision it is also run in fp32, which shows what the low
precision changes, and with cast weights instead of autocast, which shows what the place of rounding
changes. Ranks along 'tensor' also round parts of a sum before they are added: for them it is run with sums
that are added up so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from harness.backends.registry import REFERENCE
from harness.forms.terms import STEP_PHASES
from harness.judge.agreement.job_equivalence import Difference, aligned_runs, first_step, job_differences
from harness.judge.distance import (
    Distance,
    Norms,
    StepPairs,
    aligned,
    distance,
    moment_factors,
    movement,
    norm_changes,
    norms_by_step,
    standard_error,
    step_pairs,
)
from harness.judge.effective import SettingDifference, low_reductions, setting_differences
from harness.judge.quantities import Run
from harness.judge.wording import percent
from harness.record import Record
from harness.record.workload import is_another_computation


def differing_answers(reference: Record, other: Record) -> int | None:
    """Samples with another answer; None where one of the two has none."""
    if reference.answers is None or other.answers is None:
        return None
    theirs = {answer.sample: answer.text for answer in other.answers.given}
    return sum(theirs.get(answer.sample) != answer.text for answer in reference.answers.given)


TIGHT_FACTOR = 10.0
"""Another backend sums in an order of its own: it may lie as far again as a few measured orders do."""
UNMEASURED_FACTOR, UNMEASURED_STEPS = 100.0, 20
"""Units of fp32 rounding where nothing was measured, for so many steps: 20 with clipping were seen to reach
25. Each further update rounds anew, and nothing takes that back: 300 steps were seen to reach 483."""
BAND_FACTOR = 3.0
"""Libraries round to the low precision at other places than the reference does, but not at more."""
APART = 0.05
"""Relative. Gradients that differ by less are not told from those that rounding moved."""
TIGHT, BAND, CUT_BAND = "tight", "band", "band of cut layers"
"""Names of levels."""
PROJECTIONS = 8
"""Of a sketch, as `rank/probes/weights.py` makes it."""
OVERESTIMATE = 1.0 + 2.0 / (2.0 * PROJECTIONS) ** 0.5
"""How far a distance estimated from the projections may lie above the true one: two standard errors."""
UNIT_ROUNDOFF = {
    "fp32": 2.0**-23,
    "bf16-mixed": 2.0**-8,
    "bf16": 2.0**-8,
    "fp16-mixed": 2.0**-11,
    "fp8": 2.0**-3,
}
"""Relative spacing of the compute dtype."""


ON_GRID = 1e-3
"""Of a spacing: sums and means of losses on a grid keep it in fp32."""
MEASURES = ("loss", "norm", "update", "weights")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest distance that a level allows."""

    loss: float
    norm: float
    update: float
    weights: float
    parameters: dict[str, float] = field(default_factory=dict)

    def joined(self, other: Tolerance, join: Callable[[float, float], float]) -> Tolerance:
        """Both limits as one, such as their sum; of the parameters that both have."""
        mine, theirs = self.parameters, other.parameters
        return Tolerance(
            **{name: join(getattr(self, name), getattr(other, name)) for name in MEASURES},
            parameters={name: join(mine[name], theirs[name]) for name in mine if name in theirs},
        )

    def exceeded(self, found: Distance) -> dict[str, tuple[float, float]]:
        """What lies beyond: its name to (found, allowed)."""
        beyond = {
            name: (value, limit)
            for name in MEASURES
            if (value := getattr(found, name)) is not None and not value <= (limit := getattr(self, name))
        }
        for name, value in found.parameters.items():
            if name in self.parameters and not value <= self.parameters[name]:
                beyond[name] = (value, self.parameters[name])
        return beyond


@dataclass(frozen=True, kw_only=True)
class Level:
    """How the limits of one level were found."""

    name: str
    factor: float
    """Limit over what was seen: a choice, not a measurement."""
    repetitions: tuple[str, ...]
    """Labels of the runs of the reference in other ways; empty: nothing was measured."""
    seen: Distance
    """The largest distance of a repetition from the reference."""
    rounding: str
    """Dtype whose spacing bounds the limits from below."""

    @property
    def assumed(self) -> str:
        """'3 roundings of bf16' where nothing was measured, else ''."""
        return "" if self.repetitions else f"{self.factor:g} roundings of {self.rounding}"


@dataclass(frozen=True, kw_only=True)
class NormShift:
    """Gradient norms that lie to one side of those of another run, in every step by about as much."""

    label: str
    """Of the reference, or its repetition, that rounds as the run does."""
    mean: float
    """Of the steps' differences, relative; below 0: the run's norms are smaller."""
    first: float
    """Of the first two, before weights part."""
    largest: float
    """Of the differences, without its sign."""
    allowed: float
    steps: int
    reduced_in: list[str]
    """Low dtypes of its gradients' sums over ranks, which no repetition rounds, if these round by as much."""


LEAST_STEPS, MOST_STEPS = 4, 20
"""Fewer say nothing of their spread; more are not independent, as weights drift apart."""
CHANCE = 1e-6
"""That independent differences have a mean so many standard errors from 0, by Student's t; 10 at least. Those
of 649 sound runs of published records, over 6 to 40 steps, lie 4.3 from 0 at most."""
BIAS_FACTOR = 3.0
"""Times the mean of another order of sums, which another backend's order may reach: of these it was 2.6,
but for runs with bf16 masters (12)."""
SINCE_THE_FIRST = 0.5
"""Of a mean shift: a factor changes the first norms as much, where weights are still about equal."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The levels of one job and how they were found."""

    tight: Tolerance
    band: Tolerance | None
    """None in fp32: there is no lower precision that could explain a difference."""
    cut_band: Tolerance | None = None
    """The band of runs whose ranks cut layers; None: it was not measured, or the precision is fp32."""
    derivation: tuple[str, ...]
    """One sentence for each limit."""
    levels: tuple[Level, ...] = ()
    """The same for programs."""
    answers: int | None = None
    """Most generated answers in which a repetition differs from the reference; None: none were generated."""

    no_yardstick: tuple[str, ...] = ()
    """Repetitions whose loss scaler skipped other steps than the reference's: what they differ by is no
    rounding."""
    norms: tuple[tuple[str, Norms], ...] = field(default=(), compare=False)
    """Of the reference and its repetitions, by label; empty where no other split was measured."""
    mean_norm: float = 0.0
    """How far the mean of the norms' differences lies from 0 between two orders of sums, relative."""
    error_norm: float = 0.0
    """Standard error of that mean."""
    moments: dict[str, float] = field(default_factory=dict, compare=False)
    """How far the size of each parameter's gradients, beside all others', may lie from the reference's,
    relative; {} at fp32, where norms say more, and without repetitions. What rounding makes has none."""

    def farthest_moment(self, reference: Record, record: Record) -> tuple[float, float] | None:
        """How far the gradients lie of the parameter that is farthest from the reference's, and its limit;
        None: each is within its own, or most are not."""
        away = {name: abs(factor - 1) for name, factor in moment_factors(reference, record).items()}
        beyond = [(away[name], limit) for name, limit in self.moments.items() if away.get(name, 0.0) > limit]
        return max(beyond, default=None) if 2 * len(beyond) <= len(away) else None

    def mean_shift(self, record: Record) -> NormShift | None:
        """The mean of the norms' differences from the repetition that rounds where this run does: the one
        from which they differ most evenly. None: too few steps, or no repetition measured it.

        Rounding moves norms to either side of that one's. What orders of sums add on one side is less where
        they move norms less.
        """
        own = norms_by_step(record)
        apart = [(label, norm_changes(norms, own)) for label, norms in self.norms]
        found = [(standard_error(c), label, c) for label, c in apart if len(c) >= LEAST_STEPS]
        if not found:
            return None
        error, label, changes = min(found, key=lambda one: one[0])
        count = min(len(changes), MOST_STEPS)
        error *= math.sqrt(len(changes) / count)
        bias = self.mean_norm * (min(1.0, error / self.error_norm) if self.error_norm else 1.0)
        allowed = max(BIAS_FACTOR * max(bias, UNIT_ROUNDOFF["fp32"]), _least_chance(count) * error)
        mean = float(changes.mean())
        return NormShift(
            label=label, mean=mean, allowed=allowed, steps=len(changes),
            first=float(changes[:2].mean()), largest=float(abs(changes).max()),
            reduced_in=low_reductions(record, 1.0 + mean),
        )  # fmt: skip

    def norm_shift(self, record: Record) -> NormShift | None:
        """A factor on gradients that no single norm shows; None: there is none."""
        shift = self.mean_shift(record)
        if shift is None or not abs(shift.mean) > shift.allowed:
            return None
        return shift if shift.first / shift.mean >= SINCE_THE_FIRST else None

    def widest(self, record: Record) -> Tolerance:
        limits = self.of_level(self.widest_level(record)) or self.tight
        return replace(limits, loss=max(limits.loss, BAND_FACTOR * loss_spacing(record)))

    def widest_level(self, record: Record) -> str:
        if self.cut_band is not None and record.world.mesh.size("tensor") > 1:
            return CUT_BAND
        return TIGHT if self.band is None else BAND

    def of_level(self, name: str) -> Tolerance | None:
        return {TIGHT: self.tight, BAND: self.band, CUT_BAND: self.cut_band}[name]

    def assumed(self, name: str) -> str:
        """'3 roundings of bf16': what the limits of a level are where no repetition measured it, else ''."""
        return next((level.assumed for level in self.levels if level.name == name), "")

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        del document["norms"], document["moments"]
        for name in ("answers", "cut_band", "no_yardstick"):
            if not document[name] and document[name] != 0:
                del document[name]
        levels = [level | {"repetitions": list(level["repetitions"])} for level in document["levels"]]
        return document | {"derivation": list(self.derivation), "levels": levels}


def measure_noise(reference: Record, repeats: Iterable[Record]) -> Noise:
    """Derive the limits of a job from its reference and repetitions of it.

    Without repetitions only the lower bounds are left: one unit of rounding in fp32, and of the compute
    dtype for the band. A plain repeat adds in the same order, often to the same bits: it counts, but beside
    another split only. A split changes more than the order where layers normalise over micro-batches.
    """
    made = [r for r in repeats if not is_another_computation(r, reference)]
    ran = [r for r in made if r.status == "ok"]
    same_steps = skipped(reference)
    repeats = [r for r in ran if skipped(r) == same_steps]
    # What a repetition would have shown that failed or skipped other steps, the precision bounds.
    is_complete = sum(map(_other_precision, repeats)) == sum(map(_other_precision, made))
    in_parts = [r for r in repeats if _in_parts(r)]
    others = [r for r in repeats if _other_precision(r) and not _in_parts(r)]
    splits = [r for r in repeats if not (_other_precision(r) or _in_parts(r))]
    given = reference.job.training.precision
    # A record from elsewhere may name one that nobody knows: it gets the tightest limits.
    precision = next((known for known in UNIT_ROUNDOFF if known == given), "fp32")
    if not any(is_variant(record) for record in splits):
        splits = []
    unmeasured = UNMEASURED_FACTOR * max(1.0, len(reference.steps) / UNMEASURED_STEPS)
    factor = TIGHT_FACTOR if splits else unmeasured
    measured = [distance(reference, record) for record in splits]
    is_adam = bool(measured and _other_sign(reference))
    tight = _limits(reference, measured, factor, UNIT_ROUNDOFF["fp32"], is_adam=is_adam)
    levels = [_described(reference, TIGHT, tight, factor, splits, measured, "fp32")]
    band = cut_band = None
    if precision != "fp32" or others:
        unit = "fp32" if others and is_complete else precision
        measured = [distance(reference, record) for record in others]
        band = _limits(reference, measured, BAND_FACTOR, UNIT_ROUNDOFF[unit], _other_sign(reference))
        if others:
            band = band.joined(tight, max)
        levels.append(_described(reference, BAND, band, BAND_FACTOR, others, measured, unit))
    if band is not None and in_parts:
        measured = [distance(reference, record) for record in in_parts]
        cut_band = _limits(reference, measured, BAND_FACTOR, UNIT_ROUNDOFF["fp32"]).joined(band, max)
        levels.append(_described(reference, CUT_BAND, cut_band, BAND_FACTOR, in_parts, measured, "fp32"))
    distinct: dict[tuple[Any, ...], tuple[str, Norms]] = {}  # a run is held to each, be there thousands alike
    for record in (reference, *repeats):
        of_record = norms_by_step(record)
        distinct.setdefault(tuple(of_record.items()), (record.backend.label, of_record))
    norms = [norms_by_step(record) for record in (reference, *splits)]
    shifts = [c for other in norms[1:] if len(c := norm_changes(norms[0], other)) >= LEAST_STEPS]
    means = [(abs(float(c.mean())) + (error := standard_error(c)), error) for c in shifts]
    answers = [n for record in splits if (n := differing_answers(reference, record)) is not None]
    return Noise(
        tight=tight, band=band, cut_band=cut_band, derivation=tuple(sentence for sentence, _ in levels),
        levels=tuple(level for _, level in levels),
        answers=max(answers, default=None),
        no_yardstick=tuple(dict.fromkeys(r.backend.label for r in ran if skipped(r) != same_steps)),
        norms=tuple(distinct.values()) if shifts else (),
        mean_norm=max(means, default=(0.0, 0.0))[0],
        error_norm=max(means, default=(0.0, 0.0))[1],
        moments=_moment_limits(reference, repeats) if others and is_complete else {},
    )  # fmt: skip


def _moment_limits(reference: Record, repeats: Iterable[Record]) -> dict[str, float]:
    seen = [moment_factors(reference, record) for record in repeats]
    spread = {n: max(abs(of[n] - 1) for of in seen if n in of) for n in set().union(*seen)}
    known = {name: found for name, found in spread.items() if found < APART}
    most = BAND_FACTOR * max(known.values(), default=0.0)
    return {name: max(APART, TIGHT_FACTOR * found, most) for name, found in known.items()}


def _least_chance(count: int) -> float:
    """Standard errors that the mean of so many differences may lie from 0."""
    from scipy.special import stdtrit  # a tenth of a second to import

    return max(TIGHT_FACTOR, float(stdtrit(count - 1, 1.0 - CHANCE / 2.0)))


def loss_spacing(record: Record) -> float:
    """Distance of neighbouring losses, nats, where all that ranks computed lie on the grid of the job's low
    precision; else 0. Means of several micro-steps lie on a finer one."""
    unit = UNIT_ROUNDOFF.get(record.job.training.precision, UNIT_ROUNDOFF["fp32"])
    computed = [
        abs(total) / targets
        for rank in record.ranks
        for total, targets in zip(rank.computed_loss_sums, rank.target_tokens, strict=False)
        if total and targets
    ]
    if unit == UNIT_ROUNDOFF["fp32"] or len(computed) < LEAST_STEPS:
        return 0.0
    losses = np.array(computed)
    spacings = 2.0 * unit * 2.0 ** np.floor(np.log2(losses))
    places = losses / spacings * record.world.accumulation_steps
    is_coarse = np.allclose(places, np.round(places), rtol=0.0, atol=ON_GRID)
    return float(spacings.max()) if is_coarse else 0.0


def skipped(record: Record) -> set[int]:
    without = {step.step for step in record.steps if step.gradient_norm is None}
    return without if record.skipped_steps else set()


def least_loss(record: Record) -> Tolerance | None:
    """What a run would differ by if a rank, or a micro-step, added no gradient; None: it has one of each.

    Without a share s of a gradient whose parts point anywhere, its norm is the root of 1 - s of what it was,
    and so is the cosine of the angle between the two. No rounding is as large, whatever repetitions show.
    """
    world = record.world
    parts = [n for n in (world.data_size, world.accumulation_steps) if n > 1]
    if not parts:
        return None
    left = (1.0 - 1.0 / max(parts)) ** 0.5
    apart = (2.0 - 2.0 * left) ** 0.5
    return Tolerance(loss=math.inf, norm=1.0 - left, update=math.inf, weights=apart)


def is_repetition(record: Record) -> bool:
    """Whether a run of the reference only measures noise: it has options, or is a further repeat."""
    return is_variant(record) or (record.backend.name == REFERENCE and record.repeat > 0)


def is_variant(record: Record) -> bool:
    """Whether a run is the reference with another split or precision, or a script's with moved weights."""
    if record.observation is not None and record.observation.is_moved:
        return True
    options = record.backend.options.values()
    return record.backend.name == REFERENCE and any(value is not None for value in options)


def _other_sign(reference: Record) -> float:
    """How far two runs part in one element whose gradient differs in sign, where rounding decides that.

    Adam's first update is the learning rate with the sign of the gradient, whatever its size: twice the
    learning rate lie between the two. One of 1,024 elements was seen to make all of a matrix's distance.
    """
    optimizer = reference.job.optimizer
    if optimizer.kind in ("muon", "sgd"):
        return 0.0
    scales = [g.learning_rate / optimizer.learning_rate for g in optimizer.groups or () if g.learning_rate]
    return 2.0 * max([1.0, *scales]) * max((step.learning_rate for step in reference.steps), default=0.0)


def _in_parts(record: Record) -> bool:
    return record.backend.options.get("partial_sums") is not None


def _other_precision(record: Record) -> bool:
    options = record.backend.options
    return options.get("precision") in ("fp32", "cast") or options.get("states") is not None


def _limits(
    reference: Record,
    measured: list[Distance],
    factor: float,
    unit: float,
    element: float = 0.0,
    is_adam: bool = False,
) -> Tolerance:
    """factor x the largest distance of a repetition, at least factor x one unit of rounding.

    `element`: how far rounding may move one element of a parameter, whatever was measured. `is_adam`: one
    element, whose gradient nearly cancels, may make the whole distance. That it lies in a given one of K
    parameters is as likely as its share of the elements, of the square of what moved. K times that share of
    the whole distance, at most all of it, keeps all of them together as safe as the whole.
    """
    losses = [abs(step.loss) for step in reference.steps if step.loss is not None]
    moved = movement(reference)
    total = sum(value**2 for value in moved.values()) ** 0.5
    size = reference.final_weights.l2_norm if reference.final_weights else None
    # Each update is rounded to the spacing of the weight that it is added to.
    rounding = unit * (size or 0.0) / total if total else unit

    def largest(name: str, bound: float) -> float:
        return max(bound, _largest(measured, name) or 0.0)

    weights = largest("weights", rounding)
    sketch = (reference.final_weights.sketch if reference.final_weights else None) or {}

    def held(name: str) -> float:
        share = moved.get(name, 0.0) / total if total else 0.0
        return weights * max(1.0, min(1.0, len(sketch) * share**2) / share if is_adam and share else 1.0)

    return Tolerance(
        loss=factor * largest("loss", unit * max(losses, default=1.0)),
        norm=factor * largest("norm", unit),
        # A difference of two lengths may be small by chance; estimated from eight projections it has a
        # standard error of the distance between the two over the root of eight.
        update=factor * max(largest("update", rounding), weights / PROJECTIONS**0.5),
        weights=factor * weights,
        parameters={
            name: max(
                factor
                * max(
                    [held(name), unit * sketch[name][0] / (moved.get(name) or total)]
                    + [d.parameters[name] for d in measured if name in d.parameters]
                ),
                OVERESTIMATE * element / (moved.get(name) or total),
            )
            for name in sketch
            if total
        },
    )


def _described(
    reference: Record,
    level: str,
    limits: Tolerance,
    factor: float,
    repeats: list[Record],
    measured: list[Distance],
    unit: str,
) -> tuple[str, Level]:
    """How the limits of a level were found, in a sentence and for programs."""
    labels = tuple(dict.fromkeys(record.backend.label for record in repeats))
    seen: dict[str, Any] = {name: _largest(measured, name) for name in MEASURES}
    if repeats:
        source = f"{factor:g} times how far {', '.join(labels)} lies from the reference, at least"
    else:
        source = "assumed, as no reference ran with another split of the batch:"
    samples = (reference.steps[0].samples if reference.steps else None) or 0
    hidden = math.floor(samples * (1.0 - (1.0 - min(limits.norm, 1.0)) ** 2))
    sentence = (
        f"{level}: losses within {limits.loss:.1e} nats, gradient norms within {percent(limits.norm)}, "
        f"distance moved within {percent(limits.update)}, final weights within {percent(limits.weights)} of "
        f"the distance moved ({source} {factor:g} units of {unit} rounding)"
        + f"; a step may lack the gradient of {hidden} of {samples} samples without its norm showing it"
        * (hidden > 0)
    )
    return sentence, Level(
        name=level, factor=factor, repetitions=labels, seen=Distance(**seen), rounding=unit
    )


def _largest(measured: Iterable[Distance], name: str) -> float | None:
    return max((v for found in measured if (v := getattr(found, name)) is not None), default=None)


MEAN_NORM, MOMENT = "mean_norm", "moment"
"""In what lies beyond its limit: the mean of the norms' differences from the repetition that rounds alike,
and the gradients of one parameter beside all others'."""
MEASURED = {"norm": "gradient norms", "weights": "final weights"}
Parity = Literal["exact", "tight", "band", "diverged", "unjudged"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How a run compares with its reference."""

    parity: Parity
    loss_difference: float | None = None
    """Largest absolute difference of a step's loss, nats per token."""
    norm_difference: float | None = None
    """Largest difference of a step's gradient norm, relative to the reference's."""
    weights_difference: float | None = None
    """Distance of the final weights, in units of how far the reference's moved."""
    update_difference: float | None = None
    """Difference of the distance that the weights moved, relative to the reference's."""
    first_divergent_step: int | None = None
    """First step whose loss or norm lies beyond the level that precision allows."""
    exceeded: tuple[tuple[str, float, float], ...] = ()
    """What lies beyond that level: (loss, norm, mean_norm, moment, update, weights or a parameter's name,
    found, allowed)."""
    settings: tuple[SettingDifference, ...] = ()
    """What runs otherwise than in the reference."""
    not_same_job: tuple[Difference, ...] = ()
    reason: str | None = None
    """Why it is unjudged."""


def judge(
    reference: Run | None,
    run: Run,
    noise: Noise | None = None,
    *,
    stand_in: Run | None = None,
    unjudged: str | None = None,
) -> Judgement:
    """Compare a run with the reference of its job; `noise` is that job's, else the lower bounds.

    Where the reference has no result, `stand_in` is the run that it must be the same job as: its losses
    are not judged then. `unjudged`: why the losses cannot be those of this reference.
    """
    record = run.record
    if record.status not in ("ok", "diverged"):
        return _unjudged(f"the run ended as {record.status}")
    has_reference = reference is not None and reference.record.status == "ok"
    expected_job = reference if has_reference else stand_in
    differences = job_differences(expected_job.record, record) if expected_job is not None else []
    if differences:
        first = differences[0]
        other = "the reference" if has_reference or expected_job is None else expected_job.backend
        return _unjudged(
            f"not the same job: {first.field} {'are' if first.plural else 'is'} {first.given}, {other} has "
            f"{first.reference}",
            differences,
        )
    if reference is None or not has_reference:
        reasons = reference.record.reasons if reference is not None else []
        return _unjudged(": ".join(["the reference has no result", *reasons[:1]]))
    expected, record = aligned_runs(reference.record, record)
    if has_dropout(expected) or has_dropout(record):
        return _unjudged("dropout is active: runs differ by chance")
    noise = noise or measure_noise(expected, ())
    both = step_pairs(expected, record) if run.record.resumed else aligned(reference.series, run.series)
    other_steps = skipped(expected) ^ skipped(record)
    if other_steps:  # later weights differ for that
        expected, record = (
            one.model_copy(
                update={"steps": [s for s in one.steps if s.step <= min(other_steps)], "final_weights": None}
            )
            for one in (expected, record)
        )
        both = step_pairs(expected, record)
    found = distance(expected, record, both)
    widest = noise.widest(record)
    level = _level(expected, record, found, noise)
    if unjudged is not None and level not in ("exact", "tight"):
        return _unjudged(unjudged)  # nothing agrees so well by chance
    if other_steps and level != "diverged":
        at = min(other_steps)
        whose = "its own" if at in skipped(run.record) else "the reference's"
        later = at > first_step(record)
        until = f"step {at}; until then losses and gradient norms agree" if later else "the first step"
        return _unjudged(f"{whose} loss scaler alone skipped {until}")
    exceeded = list(widest.exceeded(found).items())
    shift = noise.norm_shift(record) if level in ("tight", "band") else None
    if shift is not None:
        level = "diverged"
        exceeded.append((MEAN_NORM, (abs(shift.mean), shift.allowed)))
    elif level in ("tight", "band") and (far := noise.farthest_moment(expected, record)) is not None:
        level = "diverged"
        exceeded.append((MOMENT, far))
    elif why := _without_yardstick(expected, record, found, noise, level):
        return _unjudged(why)
    if level == "diverged" and (why := _own_sums(expected, record, both, widest)):
        return _unjudged(why)
    return Judgement(
        parity=level,
        loss_difference=found.loss,
        norm_difference=found.norm,
        weights_difference=found.weights,
        update_difference=found.update,
        first_divergent_step=first_step_beyond(expected, both, widest),
        exceeded=tuple((name, *values) for name, values in exceeded),
        settings=tuple(setting_differences(expected, record)),
    )


def _without_yardstick(expected: Record, record: Record, found: Distance, noise: Noise, level: Parity) -> str:
    """Why repetitions of the reference are no measure of this run; '': they are."""
    least, measured = least_loss(record), any(one.repetitions for one in noise.levels)
    lost = least.exceeded(found) if least is not None else {}
    if (
        least is not None
        and level in ("tight", "band")
        and measured
        and not _excludes(least, found, noise, record)
    ):
        name, (value, most) = next(iter(lost.items()))
        return (
            f"{MEASURED[name]} differ by {percent(value)}, as those of repetitions may; a missing rank or "
            f"micro-step may change them by {percent(most)}"
        )
    finite = record.status == "ok" and found.loss is not None
    alike = skipped(record) == skipped(expected) and lost
    if level == "diverged" and finite and noise.no_yardstick and not alike:
        return (
            f"the loss scaler of {', '.join(noise.no_yardstick)} skipped other steps than the reference's: "
            "rounding was not measured"
        )
    return ""


def _excludes(least: Tolerance, found: Distance, noise: Noise, record: Record) -> bool:
    """Whether some quantity shows that no rank's gradient is missing in any step: each norm, beside the
    reference's or, with their mean, beside that of the repetition that rounds alike; or, where there are
    none, the final weights."""
    lost = least.exceeded(found)
    if not lost or (found.norm is not None and "norm" not in lost):
        return True
    mean = noise.mean_shift(record)
    if mean is None or mean.largest >= least.norm:
        return False
    return abs(mean.mean) <= mean.allowed < least.norm


def _own_sums(expected: Record, record: Record, both: StepPairs, limits: Tolerance) -> str:
    """Why what a job's own code sends in a step leaves a run unjudged; '': it sends nothing, or computes the
    reference's first loss, but not its gradient."""
    sent = {(r.op, r.phase) for r in record.comm if r.of_job and r.group_size > 1 and r.phase in STEP_PHASES}
    if not sent:
        return ""
    own = ", ".join(f"{op} in {phase}" for op, phase in sorted(sent))
    sends = f"the job's own code communicates between ranks ({own})"
    if not any(both.loss_differences[:1] <= limits.loss):
        return (
            f"{sends}, which one process cannot: its first loss is {_first(record)}, "
            f"{_first(expected)} in the reference"
        )
    if not any(both.norm_differences[:1] > limits.norm):
        agree = "loss and gradient norm agree" if all(both.norm_differences[:1] >= 0) else "loss agrees"
        return f"{sends}: the first {agree}, but no repetition measures its later rounding"
    return ""


def _first(record: Record) -> str:
    loss = record.steps[0].loss if record.steps else None
    return "not finite" if loss is None else f"{loss:.5g}"


def _unjudged(reason: str, differences: Sequence[Difference] = ()) -> Judgement:
    return Judgement(parity="unjudged", not_same_job=tuple(differences), reason=reason)


def has_dropout(record: Record) -> bool:
    live = record.observed.dropout if record.observed else None
    asked = record.job.model.dropout
    if asked is None and (live is not None or record.observation is not None):
        return bool(live)  # the model's own, or what was seen of a script
    return asked != 0.0 or bool(live)


def _level(reference: Record, record: Record, found: Distance, noise: Noise) -> Parity:
    if record is reference:
        return "exact"
    pairs = list(zip(reference.steps, record.steps, strict=False))
    if record.status == "diverged" or found.loss is None or any(b.loss is None for _, b in pairs):
        return "diverged"
    scaled = record.job.training.precision == "fp16-mixed"
    if not scaled and any(a.gradient_norm is not None and b.gradient_norm is None for a, b in pairs):
        return "diverged"
    left, right = reference.final_weights, record.final_weights
    same_weights = left is not None and right is not None and left.digest == right.digest
    if same_weights and all((a.loss, a.gradient_norm) == (b.loss, b.gradient_norm) for a, b in pairs):
        return "exact"
    if not noise.tight.exceeded(found):
        return "tight"
    if noise.band is not None and not noise.widest(record).exceeded(found):
        return "band"
    return "diverged"


def first_step_beyond(reference: Record, both: StepPairs, limits: Tolerance) -> int | None:
    """First step whose loss or gradient norm lies beyond the limits; None: only weights do, or nothing."""
    losses = ~np.isnan(both.losses[0]) & ~(both.loss_differences <= limits.loss)
    beyond = np.flatnonzero(losses | (both.norm_differences > limits.norm))
    return reference.steps[beyond[0]].step if beyond.size else None
