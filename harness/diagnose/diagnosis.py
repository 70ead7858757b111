"""Explains how two runs differ: from the records first, then from the step in which they diverge."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.backends.registry import REFERENCE
from harness.diagnose.jobs import Parting, about_partings, find_partings
from harness.diagnose.rerun import (
    Examined,
    LoadedRun,
    NoiseRuns,
    Rerun,
    Say,
    TensorComparison,
    TensorDifference,
    TensorNoise,
    compare_tensors,
    experiment_of,
    find_noise_runs,
    in_one_split,
    recorded_noise,
    reference_labels,
    require_room,
    rerun,
    run_references,
)
from harness.judge.agreement.causes import Pair, explain_divergence, name_scale, shifted, weighed
from harness.judge.agreement.job_equivalence import Difference, aligned_runs, job_differences
from harness.judge.agreement.parity import MEAN_NORM, MOMENT, Tolerance, first_step_beyond
from harness.judge.comparison import Comparison
from harness.judge.distance import Distance, distance, step_pairs
from harness.judge.effective import SettingDifference, setting_differences
from harness.judge.findings.finding import role_of
from harness.judge.findings.training import left_to_libraries, odd_updates
from harness.judge.wording import a_few, percent, words
from harness.launch.launcher import LocalLauncher, modules_to_preload
from harness.nested import grouped
from harness.record import Record, WorldPart

FIRST_STEPS = 4
"""Most defects act from the start, long before losses show them."""
LAST_STEPS = 4
"""Up to and including the one in which losses or norms diverge."""
REPORTED = ("loss-of-one-rank", "loss-normalisation", "loss-scale", "norm-of-shard")
"""Causes that concern what is reported, and not gradients or updates."""
REPLICAS, DIVIDED = "replicas-differ", "loss-not-divided"
QUANTITIES = {
    "loss": "loss {} nats",
    "norm": "gradient norm {}",
    "update": "distance moved {}",
    "weights": "final weights {} of the distance moved",
}
"""A loss is in nats per token, everything else in percent."""


def steps_to_examine(parting: int | None, last: int) -> list[int]:
    """The first steps, and those up to the one in which the runs diverge.

    Where only final weights differ that is the last step: the cause may be in any.
    """
    until = last if parting is None else parting
    early = range(min(FIRST_STEPS, until + 1))
    return sorted({*early, *range(max(0, until - LAST_STEPS + 1), until + 1)})


def how_far(found: Distance, limits: Tolerance) -> str:
    """'largest differences: loss 1.2e-03 nats (noise: 4.8e-06), ...'."""
    parts = [
        f"{text.format(_size(name, value))} (noise: {_size(name, getattr(limits, name))})"
        for name, text in QUANTITIES.items()
        if (value := getattr(found, name)) is not None
    ]
    if not parts:
        return "neither losses, norms nor weights can be compared"
    return f"largest differences: {', '.join(parts)}"


def _size(quantity: str, value: float) -> str:
    return f"{value:.1e}" if quantity == "loss" else percent(value)


def about_job(differences: Sequence[Difference], other: LoadedRun) -> Iterator[str]:
    """Fields that make the other run a different training, although both have the same job."""
    for difference in differences:
        yield (
            f"not the same training: {difference.field}: {words(difference.given)} in {other.name}, "
            f"{words(difference.reference)} in the baseline"
        )


def about_commands(baseline: LoadedRun, other: LoadedRun) -> Iterator[str]:
    """The words that one of two observed commands has and the other has not."""
    seen = [run.record.observation for run in (other, baseline)]
    if None not in seen:
        here, there = ([*one.command] for one in seen if one is not None)
        own = [" ".join(w for w in a if w not in b) or "nothing" for a, b in ((here, there), (there, here))]
        if own != ["nothing", "nothing"]:
            yield f"commands differ: {own[0]} in {other.name}, {own[1]} in the baseline"


def about_settings(
    differences: Sequence[SettingDifference], baseline: LoadedRun, other: LoadedRun,
    same_job: Sequence[Difference], *, clean: bool,
) -> Iterator[str]:  # fmt: skip
    """Settings in force that differ and change the mathematics: suspects, unless the runs agree, sound ones
    differ so, too, or what they were asked to train differs, which `about_job` names."""
    named = {difference.field.rpartition(".")[2].replace("_", " ") for difference in same_job}
    for difference in differences:
        if difference.effect == "mathematics" and difference.setting not in named:
            here, there = _values(difference)
            known = same_job or left_to_libraries(other.record, difference)
            what = "without effect here" if clean else "also differs" if known else "may matter"
            yield f"{what}: {difference.setting}: {here} in {other.name}, {there} in {baseline.name}"


def about_each(*runs: LoadedRun) -> dict[str, list[str]]:
    """Sentences by kind of the causes that one of the two records shows, and the other does not."""
    alone = [Comparison([run.record]) for run in runs]
    causes = [
        {
            f.id: f.text
            for f in (*one.findings, *odd_updates(one.rows[0], run.record))
            if role_of(f.id) == "cause"
        }
        for one, run in zip(alone, reversed(runs), strict=True)
    ]
    return grouped(
        (kind, f"{run.name}: {text}")
        for run, own in zip(runs, causes, strict=True)
        for kind, text in own.items()
        if kind == REPLICAS or any(kind not in of for of in causes)
    )


def about_reports(
    baseline: Record,
    other: Record,
    limits: Tolerance,
    *,
    names: Sequence[str] = (),
    kinds: Collection[str] = REPORTED,
) -> Iterator[str]:
    """A cause of these kinds, if a step shows it; none: whatever cause it shows.

    names: of both runs, where no reference says which of them is right: what would explain it in either.
    """
    for prefix, left, right in _either(baseline, other, names):
        cause = explain_divergence(Pair(left, right, limits))
        if not kinds or cause.kind in kinds:
            yield prefix + cause.text


def _either(left: Record, right: Record, names: Sequence[str]) -> Iterator[tuple[str, Record, Record]]:
    """The pair; with names in both orders, each behind who is right then."""
    for name, pair in zip(names or ("",), ((left, right), (right, left)), strict=False):
        yield (f"if {name} is right: " if name else "", *pair)


def about_norms(left: Record, right: Record, names: Sequence[str]) -> Iterator[str]:
    """What would explain the ratio of the first gradient norms where scripts do not show their losses.

    names: of both runs, if either may be wrong.
    """
    first, second = left.steps[0], right.steps[0]
    if not first.gradient_norm or not second.gradient_norm or (first.loss, second.loss) != (None, None):
        return
    for prefix, of, other in _either(left, right, names):
        factor = (other.steps[0].gradient_norm or 0.0) / (of.steps[0].gradient_norm or 1.0)
        if causes := name_scale(factor, other.world.mesh, other.world.accumulation_steps):
            yield f"{prefix}first gradient norm x {number(factor)}: {' or '.join(causes)}"


def about_updated(left: Record, right: Record, other: LoadedRun) -> Iterator[str]:
    """How many tensors two scripts of one strategy update, where that differs."""
    if (left.backend.label, left.world.world_size) != (right.backend.label, right.world.world_size):
        return  # flat parameters and shards are other tensors
    here, there = (r.observed.updated_tensors if r.observed else None for r in (left, right))
    if here is not None and there is not None and here != there:
        yield (
            f"the optimizer gets gradients of {there} tensors in {other.name}, {here} in the baseline: "
            "hooks, frozen or unused weights?"
        )


def _values(difference: SettingDifference) -> tuple[str, str]:
    """The run's value and the reference's; of two lists only what the other does not hold."""
    given, reference = difference.given, difference.reference
    if difference.constants is None and isinstance(given, list) and isinstance(reference, list):
        own = [[item for item in side if item not in other]
               for side, other in ((given, reference), (reference, given))]  # fmt: skip
        if any(own):
            return words(own[0]), words(own[1])
    return difference.texts


SHOWN_TENSORS = 3
TURNED = 1.5
"""A tensor farther off than so many times what its factor makes is no multiple of the baseline's."""


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """The first examined step with different tensors, or the last one if there is none."""

    step: int
    gradients: TensorComparison | None
    """None: one of the engines cannot gather them."""
    updates: TensorComparison

    @property
    def parts(self) -> bool:
        return bool(self.updates.beyond or (self.gradients and self.gradients.beyond))


def first_parting_step(
    first: Mapping[int, Examined], second: Mapping[int, Examined], noise: Mapping[int, TensorNoise]
) -> StepVerdict:
    """Compare the examined steps until tensors differ by more than noise."""
    for step in sorted(first):
        left, right, limits = first[step], second[step], noise[step]
        gradients = None
        if left.gradients is not None and right.gradients is not None:
            gradients = compare_tensors(left.gradients, right.gradients, limits.limits("gradients"))
        updates = compare_tensors(left.updates, right.updates, limits.limits("updates"))
        verdict = StepVerdict(step=step, gradients=gradients, updates=updates)
        if verdict.parts:
            break
    return verdict


def sentences(
    verdict: StepVerdict,
    world: WorldPart,
    *,
    beyond: Collection[str],
    explained: bool,
    recorded: Parting | None = None,
    either: WorldPart | None = None,
) -> Iterator[str]:
    """Sentences about a step: gradients, updates, and what follows from both.

    `beyond` names what differs in the records (loss, norm, update, weights or a parameter), `explained`
    whether the records named a cause already. `world` is that of the other run, whose ratios are named.
    `recorded`: where the records part that reruns did not reproduce. `either`: the world of the baseline,
    where no reference says which of both is right.
    """
    if verdict.gradients is None:
        yield ("gradients: not compared, since one of the engines cannot gather them (Engine.full_gradients)")
    else:
        yield _about("gradients", verdict.gradients, world, either)
    yield _about("updates", verdict.updates, world)
    agree = verdict.gradients is not None and not verdict.gradients.beyond
    if agree and verdict.updates.beyond and not explained:
        yield (
            "so the cause lies between gradient and weight: clipping, learning rate, betas, epsilon, weight "
            "decay, dtype of masters, or parameters without an optimizer; the records show no difference in "
            "any of these"
        )
    if not verdict.parts and recorded is not None:
        yield (
            f"so the reruns lack what made the difference: the records differ {recorded.when} already, "
            f"{recorded.figure} {recorded}"
        )
    elif not verdict.parts:
        yield from _nothing_parts(beyond, gathered=verdict.gradients is not None)


def _nothing_parts(beyond: Collection[str], *, gathered: bool) -> Iterator[str]:
    if not set(beyond) - {MEAN_NORM, MOMENT}:
        return
    if "norm" in beyond and not gathered:
        yield ("so the gradient or its reported norm differs; Adam may hide either from the update")
        return
    reported = [text for name, text in (("loss", "loss"), ("norm", "gradient norm")) if name in beyond]
    if reported and not set(beyond) - {"loss", "norm"}:
        wrong = f"one of them reports a wrong {' and '.join(reported)}"
        hidden = ", or changes gradients after they were read, by factors that Adam takes out of the update"
        yield f"so {wrong}{hidden}" if "norm" in beyond else f"so both train equally, but {wrong}"
    else:
        yield "so no examined step shows it: the difference accumulates over many steps, each within noise"


def _about(kind: str, compared: TensorComparison, world: WorldPart, either: WorldPart | None = None) -> str:
    if not compared.beyond:
        return f"{kind}: all {compared.compared} tensors agree"
    if compared.common_factor is not None:
        factor = compared.common_factor
        causes = name_scale(factor, world.mesh, world.accumulation_steps) if kind == "gradients" else []
        if either is not None:
            mirrored = name_scale(1 / factor, either.mesh, either.accumulation_steps)
            causes += [f"those of the baseline {cause}" for cause in mirrored]
        return f"all {kind} x {number(factor)}" + (f": {' or '.join(causes)}" if causes else "")
    absent = [tensor.name for tensor in compared.beyond if tensor.ratio == 0]
    if len(absent) == len(compared.beyond) == compared.compared:
        return f"{kind}: all are zero in the other run"
    parts = []
    if absent:
        parts.append(f"{a_few(absent, SHOWN_TENSORS, '; ')} {'has' if len(absent) == 1 else 'have'} none")
    others = [
        f"{one.name} {_factor(one)}, off by {percent(one.difference)} (noise: {percent(one.allowed)})"
        for one in compared.beyond
        if one.ratio != 0
    ]
    if others:
        parts.append(a_few(others, SHOWN_TENSORS, "; "))
    return f"{kind}: {len(compared.beyond)} of {compared.compared} tensors differ: {'; '.join(parts)}"


def _factor(one: TensorDifference) -> str:
    if one.ratio is None:
        return "where the baseline has none"
    is_turned = one.difference > TURNED * abs(one.ratio - 1) + one.allowed
    return f"in another direction, its size x {number(one.ratio)}" if is_turned else f"x {number(one.ratio)}"


def number(ratio: float) -> str:
    """A ratio as it is read: 2.000, 0.25, -1.001."""
    return f"{ratio:.3f}" if abs(ratio) >= 1 else f"{ratio:.4g}"


SHOWN_HYPOTHESES = 8
CLEAN = "no difference beyond noise"
PARTED = "the runs differ beyond noise"
OTHER_TRAINING = "not the same training, though no figure differs beyond noise"
NOT_RERUN = "an observed script is not run again, so no tensors were compared"
NOT_CONTINUED = "a run that continued a checkpoint is not run again, so no tensors were compared"


def _fact(name: str, value: bool | float | list[str] | None) -> str:
    texts = {None: "not seen", False: "no", True: "yes"}
    told = words(value) if isinstance(value, (float, list)) else texts[value]
    return f"{name.removeprefix('record.').replace('_', ' ')} = {told}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is known of two runs; the baseline is the one that the other is compared with."""

    baseline: LoadedRun
    other: LoadedRun
    found: Distance
    limits: Tolerance
    derivation: tuple[str, ...]
    """Where the limits come from."""
    same_job: Sequence[Difference]
    settings: Sequence[SettingDifference]
    beyond: dict[str, tuple[float, float]]
    """Name to (found, allowed)."""
    clean: bool
    parting_step: int | None
    """First step whose loss or norm lies beyond noise."""
    verdict: StepVerdict | None
    """Of the step that was examined; None for a clean pair, and where a script is one of it."""
    is_reproduced: bool
    """Whether reruns here gave what the records hold."""
    explanation: list[str]
    hypotheses: dict[str, dict[str, Any]]
    """Name to what speaks against it; empty for runs that agree or were asked to train otherwise, and where
    the records show one cause."""

    def table(self) -> list[str]:
        """The nearest hypotheses beside what speaks against them."""
        rows = [
            f"{name} | {', '.join(_fact(*one) for one in against.items()) or 'nothing'}"
            for name, against in self.hypotheses.items()
        ]
        head = f"hypothesis of {self.other.name} | what the records show against it"
        return [head, *rows[:SHOWN_HYPOTHESES]] if rows else []

    @property
    def outcome(self) -> str:
        """One of three: no difference, another training without one, or a difference beyond noise."""
        if self.clean:
            return CLEAN
        figures = self.beyond or self.parting_step is not None
        return PARTED if figures or not self.same_job else OTHER_TRAINING

    def as_json(self) -> dict[str, Any]:
        """The document of `diagnose --json`, but for the runs as they were given."""
        return {
            "step": self.verdict.step if self.verdict else None,
            "said": self.explanation,
            "hypotheses": self.hypotheses,
            "verdict": self.outcome,
            "baseline": self.baseline.record.run_id,
            "parting_step": self.parting_step,
            "distances": asdict(self.found),
            "limits": asdict(self.limits),
            "noise": list(self.derivation),
            "beyond": {name: list(values) for name, values in self.beyond.items()},
            "same_job": [difference.as_json() for difference in self.same_job],
            "settings": [difference.as_json() for difference in self.settings],
            "tensors": asdict(self.verdict) if self.verdict else None,
            "reproduced": self.is_reproduced if self.verdict else None,
        }


def diagnose(pair: tuple[LoadedRun, LoadedRun], say: Say) -> Diagnosis:
    """Compare the records within the noise of their job; if they differ, rerun and compare by parameter.

    Of a script, or a run that continued a checkpoint, the records alone. Raises HarnessError where a run that
    is needed cannot be made on this machine.
    """
    script = any(run.is_script for run in pair)
    continued = any(run.record.resumed is not None for run in pair)
    if script or continued:  # what can be run again from its beginning is the baseline
        pair = tuple(sorted(pair, key=lambda run: (run.is_script, run.record.resumed is not None)))  # type: ignore[assignment]
    if script:
        noise_runs = recorded_noise(pair)
        baseline, other = pair
    else:
        launcher, noise_runs = _measured_noise(pair, say)
        pair = in_one_split(pair, noise_runs, say)
        baseline, other = noise_runs.baseline(pair)
    left, right = aligned_runs(baseline.record, other.record)
    limits = noise_runs.limits(left, right)
    found = distance(left, right)
    beyond = limits.exceeded(found)
    # A factor on gradients that no single step shows, of a run beside the reference.
    noise = noise_runs.noise(left) if left.backend.label == noise_runs.label else None
    shift = noise.norm_shift(right) if noise else None
    if shift is not None:
        beyond[MEAN_NORM] = abs(shift.mean), shift.allowed
    elif noise and not beyond and (far := noise.farthest_moment(left, right)) is not None:
        beyond[MOMENT] = far
    # Of a script's job only a part is known, so that its id is always another.
    same_job = [d for d in job_differences(left, right) if not (script and d.field == "job_id")]
    settings = setting_differences(left, right)
    parting = first_step_beyond(left, step_pairs(left, right), limits)
    known = noise_runs.vouch_for(baseline.record) or other.is_script is not baseline.is_script
    names = () if known else (baseline.name, other.name)
    each = about_each(baseline, other)
    own = [text for of_kind in each.values() for text in of_kind]
    clean = not (beyond or same_job or REPLICAS in each or parting is not None)
    causes = [
        *about_job(same_job, other),
        *about_commands(baseline, other),
        *about_settings(settings, baseline, other, same_job, clean=clean),
        *([factor] if (factor := shifted(shift)) is not None else []),
    ]
    explanation = [how_far(found, limits)]
    verdict, is_reproduced = None, True
    if script or continued:
        explanation += [*about_partings(find_partings(left, right, limits)), *causes]
        if not clean:
            kinds = () if continued and beyond else (*REPORTED, "gradient-scale")
            explanation += own
            if DIVIDED not in each:  # else it is known which of them is wrong
                explanation += about_reports(left, right, limits, names=names, kinds=kinds)
            explanation += [*about_updated(left, right, other), *about_norms(left, right, names)] * script
            explanation += [NOT_RERUN if script else NOT_CONTINUED]
    elif clean:
        explanation += causes
    else:
        causes += own
        reruns = _rerun_all(baseline, other, noise_runs, parting, launcher, say)
        verdict = first_parting_step(
            reruns[0].examined, reruns[1].examined, _noise(reruns, baseline, noise_runs)
        )
        # Without gradients, which not every engine can gather, whatever cause the records show.
        causes += about_reports(left, right, limits, names=names, kinds=REPORTED if verdict.gradients else ())
        missed = list(_not_reproduced((baseline, other), reruns, limits))
        is_reproduced = not missed
        explanation += [*causes, *missed]
        explanation += sentences(
            verdict, other.record.world, beyond=beyond, explained=bool(causes),
            recorded=next(iter(find_partings(left, right, limits)), None) if missed else None,
            either=None if known else baseline.record.world,
        )  # fmt: skip
    return Diagnosis(
        baseline=baseline, other=other, found=found, limits=limits,
        derivation=noise_runs.derivation(baseline.record), same_job=same_job, settings=settings,
        beyond=beyond, clean=clean, parting_step=parting, verdict=verdict, explanation=explanation,
        is_reproduced=is_reproduced,
        hypotheses={} if clean or same_job else weighed(Pair(
            left, right, limits, [one.setting for one in settings if one.effect == "mathematics"], shift)),
    )  # fmt: skip


def _not_reproduced(pair: Sequence[LoadedRun], reruns: Sequence[Rerun], limits: Tolerance) -> Iterator[str]:
    for run, again in zip(pair, reruns, strict=False):
        if parted := find_partings(run.record, again.record, limits):
            sides = parted[0].between("in its record", "when run again")
            yield (
                f"not reproduced here: {run.name}, {parted[0].figure} {parted[0].when}: {sides}; "
                "environment, imported files, versions or machine differ"
            )


def _measured_noise(pair: tuple[LoadedRun, LoadedRun], say: Say) -> tuple[LocalLauncher, NoiseRuns]:
    """What starts further runs here, and the references of the job; those without a record run now."""
    some, records = pair[0].record, [run.record for run in pair]
    labels = [REFERENCE, *(record.backend.label for record in records)]
    launcher = LocalLauncher(some.world.device, modules_to_preload(experiment_of(some), labels))
    noise_runs = find_noise_runs(
        pair,
        lambda plain: reference_labels(plain, records),
        lambda missing: run_references(some, missing, launcher, say),
    )
    return launcher, noise_runs


def _rerun_all(
    baseline: LoadedRun,
    other: LoadedRun,
    noise_runs: NoiseRuns,
    parting: int | None,
    launcher: LocalLauncher,
    say: Say,
) -> list[Rerun]:
    """The baseline, the other, and the runs of the reference that are not the baseline."""
    last = min(len(run.record.steps) for run in (baseline, other)) - 1
    steps = steps_to_examine(parting, last)
    # The reference and one repetition of each kind.
    references = (*noise_runs.repeats, *([noise_runs.reference] if noise_runs.reference else []))
    of_kinds = {record.backend.label: record for record in references}.values()
    wanted = [baseline.record, other.record, *(r for r in of_kinds if r.run_id != baseline.record.run_id)]
    for record in wanted:
        require_room(record)
    return [rerun(record, steps, launcher, say) for record in wanted]


def _noise(reruns: Sequence[Rerun], baseline: LoadedRun, noise_runs: NoiseRuns) -> dict[int, TensorNoise]:
    """Noise among the reference's repetitions, by step; without a reference, the lower bounds."""
    is_reference = baseline.record.backend.label == noise_runs.label
    made = [reruns[0], *reruns[2:]] if is_reference else reruns[2:]
    by_label = {run.record.backend.label: run for run in made}
    reference = by_label.get(noise_runs.label, reruns[0])
    repeats = [run for run in by_label.values() if run is not reference]
    return {
        step: TensorNoise(
            reference=examined,
            splits=[r.examined[step] for r in repeats if not _is_low(r)],
            others=[r.examined[step] for r in repeats if _is_low(r)],
            precision=baseline.record.job.training.precision,
            factor=1.0 if is_reference else 2.0,
        )
        for step, examined in reference.examined.items()
    }


def _is_low(run: Rerun) -> bool:
    return run.record.backend.options.get("precision") in ("fp32", "cast")
