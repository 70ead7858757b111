"""How two runs of different jobs part: which settings differ, what parts first, and which setting does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import ValidationError

from harness.diagnose.rerun import (
    LoadedRun,
    NoiseRuns,
    Say,
    experiment_of,
    recorded_layout,
    recorded_noise,
    require_room,
    rerun,
)
from harness.errors import HarnessError
from harness.job.batch import layout_over
from harness.job.job import Job
from harness.judge.agreement.job_equivalence import aligned_runs, first_step, from_step
from harness.judge.agreement.parity import UNIT_ROUNDOFF, Tolerance, has_dropout, measure_noise
from harness.judge.distance import StepPairs, distance, relative_distance, step_pairs
from harness.judge.effective import setting_differences
from harness.judge.wording import CellName, words
from harness.launch.launcher import LocalLauncher, modules_to_preload
from harness.nested import differences, put, value_at
from harness.record import Record
from harness.record.workload import depends_on_split

STEPS_AFTER = 4
"""A rerun goes on for so many steps after the runs part, so that what acts later shows too."""
MOST_OF_IT = 0.8
"""The share of the difference from which one setting is said to explain it."""
SHOWN = 3
"""Settings with their share in the verdict, where none makes the difference alone."""
Effect = Literal["mathematics", "rounding"]
NoiseOfJobs: TypeAlias = Mapping[str, NoiseRuns]
"""By job, what lies beside its run."""
SAME_MATHEMATICS = {
    "loss.chunk_tokens",
    "model.attention",
    "model.compile",
    "optimizer.implementation",
    "training.activation_checkpointing",
    "training.deterministic",
}
"""Settings of a job that change the order of operations or their cost, not what is computed."""
CUT = {"training.accumulation_steps", "training.micro_batch_size"}
"""The same, unless the loss hangs on how a batch is split or draws random numbers."""
BACKEND = "backend"
IN_FORCE = " in force"
"""After the name of what no setting of the job says and the libraries do."""
OF_JOB = {
    "gradient clipping": "training.gradient_clipping",
    "optimizer": "optimizer.",
    "dtype": "training.precision",
    "attention kernel": "model.attention",
    "dropout": "model.dropout",
    "TF32": "training.tf32",
    "compiled": "model.compile",
    "loss scale": "training.",
}
"""How a setting in force begins, and the settings of the job that change it."""
RATE_ROUNDING = UNIT_ROUNDOFF["fp32"]
"""Relative. A rate that two programs compute in another order; an update in fp32 is rounded by as much."""
SIZE, INITIAL = "number of parameters", "initial weights"
SAMPLES = "what the samples hold"
LOSS, NORM, RATE = "loss", "gradient norm", "learning rate"
FINAL = "final weights"
NOT_FINITE = "not finite"
RELATIVE = {LOSS: " nats", INITIAL: " of their norm", FINAL: " of the distance that the baseline's moved"}
"""What a difference is in; of any other figure it is relative to the baseline's."""
FILES = "contents of the files that the job names"


@dataclass(frozen=True, kw_only=True)
class Changed:
    """One setting that differs between the runs."""

    setting: str
    baseline: Any
    other: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.setting}: {words(self.baseline)} against {words(self.other)}"


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first step in which a figure differs."""

    step: int
    """Initial weights differ before it, final weights after it."""
    figure: str
    baseline: float | str | None
    other: float | str | None
    difference: float | None
    """Absolute for a loss (nats), else relative; None where a value is no number."""
    noise: float | None

    def __str__(self) -> str:
        """'5.01 in the baseline, 5.02 in the other; difference 1.0e-02 nats (rounding explains 6.0e-05)'."""
        return self.between("in the baseline", "in the other")

    def between(self, first: str, second: str) -> str:
        """Describe the difference with these words for the two sides."""
        known = self.baseline is not None and self.other is not None
        # With as many digits as tell them apart, six at least.
        shown = [[_number(value, digits) for value in (self.baseline, self.other)] for digits in (6, 9, 17)]
        left, right = next((pair for pair in shown if pair[0] != pair[1]), shown[0])
        values = f"{left} {first}, {right} {second}"
        if self.difference is None:
            return values if known else "by how much is not known"
        unit = RELATIVE.get(self.figure, " of the baseline's")
        noise = f" (rounding explains {self.noise:.1e})" if self.noise else ""
        return f"{f'{values}; ' if known else ''}difference {self.difference:.1e}{unit}{noise}"

    @property
    def when(self) -> str:
        """'in step 3', or 'before step 0' of what a run begins with."""
        if self.figure in (SIZE, INITIAL):
            return f"before step {self.step}"
        return f"{'after' if self.figure == FINAL else 'in'} step {self.step}"


@dataclass(frozen=True, kw_only=True)
class SettingTrial:
    """The baseline's job, run again with one setting of the other run."""

    setting: str
    why_not: str | None = None
    """Why it cannot be changed alone."""
    parting_step: int | None = None
    """First step beyond rounding from the baseline's rerun; None: none is."""
    figure: str | None = None
    """What parts there."""
    not_finite: int | None = None
    """First step whose loss or norm is not finite, although the baseline's is; None: none is."""
    share: float | None = None
    """Of the difference between both runs in the losses that were run again, in norms where losses agree
    within rounding, or in final weights where both do: its projection on that difference over the whole."""


@dataclass(frozen=True, kw_only=True)
class JobsDiagnosis:
    """What is known of two runs of different jobs."""

    baseline: LoadedRun
    other: LoadedRun
    settings: tuple[Changed, ...]
    partings: tuple[Parting, ...]
    """Of each figure that differs beyond rounding its first step, in order; empty: none does."""
    trials: tuple[SettingTrial, ...] | None
    """None: nothing was run again."""
    last_step: int | None
    """Up to which runs were made again."""
    cautions: tuple[str, ...] = ()
    """What makes figures or reruns say less than they seem to."""

    @property
    def parting(self) -> Parting | None:
        return self.partings[0] if self.partings else None

    @property
    def clean(self) -> bool:
        return self.parting is None

    @property
    def blamed(self) -> list[str]:
        """Settings each of which alone makes most of the difference."""
        return [
            t.setting for t in self.trials or () if t.share is not None and abs(t.share - 1) <= 1 - MOST_OF_IT
        ]

    def as_json(self) -> dict[str, Any]:
        """The document of `diagnose --json`, but for the runs as they were given."""
        return {
            "verdict": self.verdict(),
            "said": list(self.sentences()),
            "baseline": self.baseline.record.run_id,
            "settings": [asdict(changed) for changed in self.settings],
            "parts_first": asdict(self.parting) if self.parting else None,
            "partings": [asdict(parting) for parting in self.partings],
            "trials": None if self.trials is None else [asdict(trial) for trial in self.trials],
            "blamed": self.blamed,
        }

    def verdict(self) -> str:
        names = f"{self.other.name} and {self.baseline.name}"
        if self.parting is None:
            return f"{names} trained different jobs, and no loss, norm or weight differs beyond rounding"
        if self.trials is None:
            apart = "end with different weights" if self.parting.figure == FINAL else "diverge"
            return f"{names} trained different jobs and {apart} {self.parting.when}"
        if self.blamed:
            makes = "makes" if len(self.blamed) == 1 else "each make"
            return f"{' and '.join(self.blamed)} {makes} the difference"
        tried = [trial for trial in self.trials if trial.why_not is None]
        if not tried:
            return f"{names} diverge {self.parting.when}, and no setting could be tried alone"
        if all(trial.share is None and trial.not_finite is None for trial in tried):
            return (
                f"up to step {self.last_step} no loss or norm differs beyond rounding: no setting is blamed"
            )
        moving = [t for t in self.trials if t.parting_step is not None and t.share is not None]
        largest = sorted(moving, key=lambda trial: -abs(trial.share or 0.0))[:SHOWN]
        makes = ", ".join(f"{trial.setting} {trial.share:.0%}" for trial in largest)
        return f"no single setting makes the difference{f'; alone they make: {makes}' if makes else ''}"

    def sentences(self) -> Iterator[str]:
        """The evidence, the settings first."""
        by_effect = {"mathematics": "changes the mathematics", "rounding": "changes rounding or cost only"}
        for effect, what in by_effect.items():
            yield from (f"{what}: {changed}" for changed in self.settings if changed.effect == effect)
        yield from about_partings(self.partings)
        yield from self.cautions
        if self.trials is None and self.parting is not None:
            yield "--rerun finds which of them matters: it changes one at a time"
        for trial in self.trials or ():
            yield f"{trial.setting} alone: {self._outcome(trial)}"

    def _outcome(self, trial: SettingTrial) -> str:
        if trial.why_not is not None:
            return f"cannot be tried, {trial.why_not}"
        if trial.parting_step is None:
            return "no difference beyond rounding"
        share = (
            ""
            if trial.share is None
            else f", {trial.share:.0%} of the difference up to step {self.last_step}"
        )
        lost = "" if trial.not_finite is None else f", not finite in step {trial.not_finite}"
        parts = (
            "ends with other weights" if trial.figure == FINAL else f"diverges in step {trial.parting_step}"
        )
        return f"{parts}{lost}{share}"


def about_partings(partings: Sequence[Parting]) -> Iterator[str]:
    """The figure that differs first, then the others, a sentence each."""
    for index, parting in enumerate(partings):
        differs = "differ" if parting.figure in (INITIAL, FINAL) else "differs"
        first = f"{differs} first, {parting.when}" if not index else f"{differs} {parting.when}"
        yield f"{parting.figure} {first}: {parting}"


def _number(value: float | str | None, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else words(value)


def diagnose_jobs(pair: tuple[LoadedRun, LoadedRun], say: Say, *, reruns: bool) -> JobsDiagnosis:
    """Compare two runs of different jobs; the first is the baseline.

    reruns: train the baseline's job again with one setting of the other at a time. Raises HarnessError where
    the baseline cannot be run on this machine.
    """
    baseline, other = (run.record for run in pair)
    noise: dict[str, NoiseRuns] = {}
    for run in pair:
        try:
            noise[run.record.job_id] = recorded_noise((run, run))
        except HarnessError:  # a loss that draws random numbers for each part has no reference in its split
            noise[run.record.job_id] = NoiseRuns(reference=None, repeats=())
    settings = tuple(changed_settings(baseline, other))
    partings = tuple(find_partings(baseline, other, limits_of(baseline, other, noise)))
    trials, last, cautions = None, None, list(_cautions(pair, noise))
    if reruns and partings:
        computed = next((one for one in partings if one.figure in (LOSS, NORM)), partings[-1])
        end = min(baseline.steps[-1].step, other.steps[-1].step)
        last = min(computed.step + STEPS_AFTER, end)
        again, tried = _trials(pair, settings, last, noise, say)
        trials = tuple(tried)
        if left := find_partings(baseline, again, limits_of(baseline, again, noise)):
            cautions.append(
                f"the rerun of the baseline leaves its record {left[0].when}: code, versions, machine or "
                "random numbers differ"
            )
    return JobsDiagnosis(
        baseline=pair[0], other=pair[1], settings=settings, partings=partings, trials=trials, last_step=last,
        cautions=tuple(cautions),
    )  # fmt: skip


def limits_of(baseline: Record, other: Record, noise: NoiseOfJobs | None = None) -> Tolerance:
    """What rounding in the finer of both precisions explains, whichever run is the baseline.

    As the repetitions of that job's reference show it, else the lower bounds.
    """
    finer = min(baseline, other, key=_unit)
    known = (noise or {}).get(finer.job_id)
    if known is None or not known.repeats:
        return measure_noise(finer, ()).widest(other)
    return known.limits(finer, other)


def _unit(record: Record) -> float:
    return UNIT_ROUNDOFF.get(record.job.training.precision, UNIT_ROUNDOFF["fp32"])


def _cautions(pair: tuple[LoadedRun, LoadedRun], noise: NoiseOfJobs) -> Iterator[str]:
    records = [run.record for run in pair]
    for run in pair:
        if run.record.resumed is not None:
            yield (
                f"{run.name} continued the checkpoint of step {run.record.resumed.step}: compared from there "
                "on, what it restored is a suspect too, and reruns begin at step 0"
            )
    if not any(of_job.repeats for of_job in noise.values()):
        yield (
            "rounding was not measured, since no repetition of a reference lies beside these runs: "
            f"{measure_noise(min(records, key=_unit), ()).derivation[-1]}"
        )
    if drawn := [run.name for run in pair if has_dropout(run.record)]:
        yield f"dropout is active in {' and '.join(drawn)}: a part of any difference may be chance"
    coarse = max(records, key=_unit)
    if _unit(coarse) > min(map(_unit, records)):
        limits = limits_of(coarse, coarse, noise)
        yield (
            f"rounding of {coarse.job.training.precision} alone explains {limits.loss:.1e} nats of a loss "
            f"and {limits.norm:.1e} of a gradient norm"
        )


def changed_settings(baseline: Record, other: Record) -> Iterator[Changed]:
    """Settings of the job, the backend, and what is in force although the job does not say it."""
    found = list(differences(baseline.job.model_dump(mode="json"), other.job.model_dump(mode="json")))
    either = baseline, other
    cut = set() if any(depends_on_split(run) or has_dropout(run) for run in either) else CUT
    for keys, left, right in found:
        name = ".".join(keys)
        effect: Effect = "rounding" if name in SAME_MATHEMATICS | cut else "mathematics"
        yield Changed(setting=name, baseline=left, other=right, effect=effect)
    if not found:
        yield Changed(setting=FILES, baseline=baseline.job_id, other=other.job_id, effect="mathematics")
    here, there = (str(CellName.of(run)) for run in either)
    if here != there:
        yield Changed(setting=BACKEND, baseline=here, other=there, effect="rounding")
    names = [".".join(keys) for keys, _, _ in found]
    for difference in setting_differences(baseline, other):
        values = difference.texts[::-1]
        of_job = next((part for start, part in OF_JOB.items() if difference.setting.startswith(start)), "")
        asked = of_job and any(name.startswith(of_job) for name in names)
        if difference.effect == "mathematics" and not asked:
            yield Changed(
                setting=f"{difference.setting}{IN_FORCE}", baseline=values[0], other=values[1],
                effect="mathematics",
            )  # fmt: skip


def find_partings(baseline: Record, other: Record, limits: Tolerance) -> list[Parting]:
    """First step in which each figure differs beyond rounding, or is not finite in one run alone.

    In order of steps, and of a step: weights, samples, loss, gradient norm, learning rate. A run that
    continued a checkpoint is compared from its first step on.
    """
    baseline, other = aligned_runs(baseline, other)
    found: dict[str, Parting] = {}

    def add(step: int, figure: str, values: Any, difference: float | None, noise: float | None) -> None:
        found.setdefault(
            figure,
            Parting(step=step, figure=figure, baseline=values[0], other=values[1], difference=difference,
                    noise=noise),
        )  # fmt: skip

    first, others = baseline.initial_weights, other.initial_weights
    counts = [f"{of.parameter_count:,}" for of in (first, others) if of is not None]
    if len(set(counts)) > 1:
        add(baseline.steps[0].step, SIZE, counts, None, None)
    elif first is not None and others is not None and first.digest != others.digest:
        apart, unit = relative_distance(first, others), max(_unit(baseline), _unit(other))
        if apart is None or apart > unit:
            add(baseline.steps[0].step, INITIAL, (None, None), apart, unit)
    both = step_pairs(baseline, other)
    for left, right, loss, norm in zip(
        baseline.steps, other.steps, both.loss_differences, both.norm_differences, strict=False
    ):
        rate = abs(right.learning_rate - left.learning_rate) / (abs(left.learning_rate) or 1.0)
        samples = left.sample_hashes, right.sample_hashes
        if None not in samples and samples[0] != samples[1]:
            add(left.step, SAMPLES, samples, None, None)
        for figure, values, difference, noise in (
            (LOSS, (left.loss, right.loss), float(loss), limits.loss),
            (NORM, (left.gradient_norm, right.gradient_norm), float(norm), limits.norm),
            (RATE, (left.learning_rate, right.learning_rate), rate, RATE_ROUNDING),
        ):
            if None not in values and values[0] != values[1] and not difference <= noise:
                add(left.step, figure, values, difference if np.isfinite(difference) else None, noise)
            elif values.count(None) == 1 and _computes(baseline, figure) and _computes(other, figure):
                add(left.step, figure, [NOT_FINITE if v is None else v for v in values], None, noise)
    weights = distance(baseline, other, both).weights
    is_comparable = SIZE not in found and len(baseline.steps) == len(other.steps)
    if is_comparable and weights is not None and not weights <= limits.weights:
        add(baseline.steps[-1].step, FINAL, (None, None), weights, limits.weights)
    return list(found.values())


def _computes(record: Record, figure: str) -> bool:
    """Whether steps of a run have this figure wherever it is finite; a script may lack it in some of them."""
    return record.observation is None or (figure == LOSS and record.status == "diverged")


def _trials(
    pair: tuple[LoadedRun, LoadedRun], settings: Sequence[Changed], last: int, noise: NoiseOfJobs, say: Say
) -> tuple[Record, list[SettingTrial]]:
    """The baseline's rerun, and a trial of each setting."""
    baseline, other = (run.record for run in pair)
    launcher = LocalLauncher(
        baseline.world.device,
        modules_to_preload(experiment_of(baseline), [baseline.backend.label, other.backend.label]),
    )
    require_room(baseline)
    is_end = last == baseline.steps[-1].step == other.steps[-1].step

    def run(record: Record) -> Record:
        return rerun(record, [last], launcher, say, weights=is_end).record

    start = run(baseline)
    whole = limits_of(start, other, noise)
    ends_apart = any(one.figure == FINAL for one in find_partings(start, other, whole))

    def trial(setting: str) -> SettingTrial:
        try:
            again = run(with_setting(baseline, other, setting))
        except (HarnessError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            return SettingTrial(setting=setting, why_not=why)
        partings = find_partings(start, again, limits_of(start, again, noise))
        begun, tried = (from_step(run, first_step(other)) for run in (start, again))
        share = share_of(step_pairs(begun, tried), step_pairs(begun, other), whole)
        if share is None and ends_apart:
            share = share_of_weights(start, again, other)
        return SettingTrial(
            setting=setting, parting_step=partings[0].step if partings else None,
            figure=partings[0].figure if partings else None, share=share,
            not_finite=next((one.step for one in partings if one.other == NOT_FINITE), None),
        )  # fmt: skip

    names = [changed.setting for changed in settings if not changed.setting.endswith(IN_FORCE)]
    return start, [trial(name) for name in names]


def share_of(part: StepPairs, whole: StepPairs, limits: Tolerance) -> float | None:
    """How much of a difference between two runs another pair makes: its projection on it, over its size.

    Of losses, or of gradient norms where losses differ by no more than rounding; None where neither differs.
    Where one run alone is not finite: of the steps in which it is not, the share in which the other pair
    is finite or not as that run is.
    """
    for name, found, limit in (
        ("losses", whole.loss_differences, limits.loss),
        ("norms", whole.norm_differences, limits.norm),
    ):
        (before, after), (begun, tried) = getattr(whole, name), getattr(part, name)
        made, wanted = tried - begun, after - before
        lost = np.isnan(before) != np.isnan(after)
        if len(made) == len(wanted) and lost.any():
            return float((np.isnan(tried) == np.isnan(after))[lost].mean())
        if len(made) == len(wanted) and (found > limit).any():
            known = np.isfinite(made * wanted)
            size = float(wanted[known] @ wanted[known])
            return float(made[known] @ wanted[known]) / size if size else None
    return None


def share_of_weights(start: Record, tried: Record, other: Record) -> float | None:
    """The same of the weights that runs end with; None where one was not seen to its end, or none differs."""
    sketches = [(run.final_weights and run.final_weights.sketch) or {} for run in (start, tried, other)]
    common = set.intersection(*map(set, sketches))
    begun, made, wanted = (np.concatenate([of[n][1:] for n in sorted(common)] or [[]]) for of in sketches)
    size = float((wanted - begun) @ (wanted - begun))
    return float((made - begun) @ (wanted - begun)) / size if size else None


def with_setting(baseline: Record, other: Record, setting: str) -> Record:
    """The baseline with one setting of the other run. Raises HarnessError where that makes no run."""
    if setting == FILES:
        raise HarnessError("since both jobs name the same files")
    job, source = baseline.job, other if setting == BACKEND else baseline
    if setting != BACKEND:
        keys = tuple(setting.split("."))
        document = job.model_dump(mode="json")
        put(document, keys, value_at(other.job.model_dump(mode="json"), keys))
        job = Job.model_validate(document)
    held = recorded_layout(source)
    held = replace(held, global_batch_size=job.training.global_batch_size or held.global_batch_size)
    layout = layout_over(source.world.data_size, held, job.training)
    cut = {"micro_batch_size": layout.micro_batch_size, "accumulation_steps": layout.accumulation_steps}
    return source.model_copy(update={"job": job, "world": source.world.model_copy(update=cut)})
