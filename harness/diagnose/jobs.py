"""How two runs of different jobs part: which settings differ, what parts first, and which setting does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from harness.diagnose.pair import LoadedRun
from harness.diagnose.rerun import Rerun, Say, experiment_of, layout_of, require_room, rerun
from harness.errors import HarnessError
from harness.job.batch import layout_over
from harness.job.job import Job
from harness.judge.distance import traces
from harness.judge.effective import setting_differences
from harness.judge.noise import Tolerance, measure_noise
from harness.judge.wording import words
from harness.launch.launcher import LocalLauncher, modules_to_preload
from harness.nested import differences, put, value_at
from harness.record import Record

STEPS_AFTER = 4
"""A rerun goes on for so many steps after the runs part, so that what acts later shows too."""
MOST_OF_IT = 0.8
"""The share of the difference from which one setting is said to explain it."""
Effect = Literal["mathematics", "rounding"]
SAME_MATHEMATICS = {
    "loss.chunk_tokens",
    "model.attention",
    "model.compile",
    "optimizer.implementation",
    "training.activation_checkpointing",
    "training.deterministic",
}
"""Settings of a job that change the order of operations or their cost, not what is computed."""
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
SAMPLES = "what the samples hold"
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
    """The figure that differs first."""

    step: int
    figure: str
    baseline: float | str | None
    other: float | str | None
    difference: float | None
    """In nats of a loss, relative of a norm or rate; None: of what is no number."""
    noise: float | None


@dataclass(frozen=True, kw_only=True)
class SettingTrial:
    """The baseline's job, run again with one setting of the other run."""

    setting: str
    why_not: str | None = None
    """Why it cannot be changed alone."""
    parting_step: int | None = None
    """First step beyond rounding from the baseline's rerun; None: none is."""
    share: float | None = None
    """Of the difference in loss between both runs at the last step that was run again."""


@dataclass(frozen=True, kw_only=True)
class JobsDiagnosis:
    """What is known of two runs of different jobs."""

    baseline: LoadedRun
    other: LoadedRun
    settings: tuple[Changed, ...]
    parting: Parting | None
    """None: nothing differs beyond rounding."""
    trials: tuple[SettingTrial, ...] | None
    """None: nothing was run again."""
    last_step: int | None
    """Up to which runs were made again."""

    @property
    def clean(self) -> bool:
        """Whether no figure differs, although settings do."""
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
            "trials": None if self.trials is None else [asdict(trial) for trial in self.trials],
            "blamed": self.blamed,
        }

    def verdict(self) -> str:
        """The answer in one sentence."""
        names = f"{self.other.name} and {self.baseline.name}"
        if self.parting is None:
            return f"{names} trained different jobs, and no loss or norm differs beyond rounding"
        if self.trials is None:
            return f"{names} trained different jobs and diverge in step {self.parting.step}"
        if self.blamed:
            makes = "makes" if len(self.blamed) == 1 else "each make"
            return f"{' and '.join(self.blamed)} {makes} the difference"
        return "no setting alone makes the difference; those that move the loss act together"

    def sentences(self) -> Iterator[str]:
        """The evidence, the settings first."""
        by_effect = {"mathematics": "changes the mathematics", "rounding": "changes rounding or cost only"}
        for effect, what in by_effect.items():
            yield from (f"{what}: {changed}" for changed in self.settings if changed.effect == effect)
        if self.parting is not None:
            yield _about_parting(self.parting)
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
            else f", {trial.share:.0%} of the difference in loss at step {self.last_step}"
        )
        return f"diverges in step {trial.parting_step}{share}"


def _about_parting(parting: Parting) -> str:
    values = f"{_number(parting.baseline)} in the baseline, {_number(parting.other)} in the other"
    if parting.difference is None:
        return f"{parting.figure} differs first, in step {parting.step}: {values}"
    unit = " nats" if parting.figure == "loss" else " of the baseline's"
    noise = "" if parting.noise is None else f" (rounding explains {parting.noise:.1e})"
    return (
        f"{parting.figure} differs first, in step {parting.step}: {values}; difference "
        f"{parting.difference:.1e}{unit}{noise}"
    )


def _number(value: float | str | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else words(value)


def diagnose_jobs(pair: tuple[LoadedRun, LoadedRun], say: Say, *, reruns: bool) -> JobsDiagnosis:
    """Compare two runs of different jobs; the first is the baseline.

    reruns: train the baseline's job again with one setting of the other at a time. Raises HarnessError where
    the baseline cannot be run on this machine.
    """
    baseline, other = pair
    settings = tuple(changed_settings(baseline.record, other.record))
    limits = measure_noise(baseline.record, ()).widest(other.record)
    parting = first_parting(baseline.record, other.record, limits)
    trials, last = None, None
    if reruns and parting is not None:
        steps = min(len(run.record.steps) for run in pair)
        last = min(parting.step + STEPS_AFTER, baseline.record.steps[steps - 1].step)
        trials = tuple(_trials(pair, settings, last, say))
    return JobsDiagnosis(
        baseline=baseline, other=other, settings=settings, parting=parting, trials=trials, last_step=last
    )


def changed_settings(baseline: Record, other: Record) -> Iterator[Changed]:
    """Settings of the job, the backend, and what is in force although the job does not say it."""
    found = list(differences(baseline.job.model_dump(mode="json"), other.job.model_dump(mode="json")))
    for keys, left, right in found:
        name = ".".join(keys)
        effect: Effect = "rounding" if name in SAME_MATHEMATICS else "mathematics"
        yield Changed(setting=name, baseline=left, other=right, effect=effect)
    if not found:
        yield Changed(setting=FILES, baseline=baseline.job_id, other=other.job_id, effect="mathematics")
    here, there = _place(baseline), _place(other)
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


def _place(record: Record) -> str:
    return f"{record.backend.label} on {record.world.world_size} ranks"


def first_parting(baseline: Record, other: Record, limits: Tolerance) -> Parting | None:
    """The figure that differs first, in the order of a step: samples, loss, gradient norm, learning rate."""
    both = traces(baseline, other)
    for left, right, loss, norm in zip(
        baseline.steps, other.steps, both.loss_differences, both.norm_differences, strict=False
    ):
        rate = abs(right.learning_rate - left.learning_rate) / (abs(left.learning_rate) or 1.0)
        samples = left.sample_hashes, right.sample_hashes
        if None not in samples and samples[0] != samples[1]:
            return Parting(
                step=left.step, figure=SAMPLES, baseline=samples[0], other=samples[1], difference=None,
                noise=None,
            )  # fmt: skip
        for figure, values, difference, noise in (
            ("loss", (left.loss, right.loss), float(loss), limits.loss),
            ("gradient norm", (left.gradient_norm, right.gradient_norm), float(norm), limits.norm),
            ("learning rate", (left.learning_rate, right.learning_rate), rate, 0.0),
        ):
            if None not in values and difference > noise:
                return Parting(
                    step=left.step, figure=figure, baseline=values[0], other=values[1],
                    difference=difference, noise=noise,
                )  # fmt: skip
    return None


def _trials(
    pair: tuple[LoadedRun, LoadedRun], settings: Sequence[Changed], last: int, say: Say
) -> Iterator[SettingTrial]:
    baseline, other = (run.record for run in pair)
    launcher = LocalLauncher(
        baseline.world.device,
        modules_to_preload(experiment_of(baseline), [baseline.backend.label, other.backend.label]),
    )
    require_room(baseline)

    def run(record: Record) -> Rerun:
        return rerun(record, [last], launcher, say)

    start, end = run(baseline).record, _loss_at(other, last)
    limits = measure_noise(start, ()).widest(start)
    for changed in settings:
        if not changed.setting.endswith(IN_FORCE):
            yield _trial(changed.setting, pair, start, end, limits, run)


def _trial(
    setting: str, pair: tuple[LoadedRun, LoadedRun], start: Record, end: float | None, limits: Tolerance,
    run: Callable[[Record], Rerun],
) -> SettingTrial:  # fmt: skip
    try:
        again = run(with_setting(pair[0].record, pair[1].record, setting)).record
    except (HarnessError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        return SettingTrial(setting=setting, why_not=why)
    parting = first_parting(start, again, limits)
    reached, before = _loss_at(again, start.steps[-1].step), _loss_at(start, start.steps[-1].step)
    share = None
    if None not in (reached, before, end) and end != before:
        share = (reached - before) / (end - before)  # type: ignore[operator]
    return SettingTrial(setting=setting, parting_step=parting.step if parting else None, share=share)


def _loss_at(record: Record, step: int) -> float | None:
    return next((one.loss for one in record.steps if one.step == step), None)


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
    held = layout_of(source)
    held = replace(held, global_batch_size=job.training.global_batch_size or held.global_batch_size)
    layout = layout_over(source.world.data_size, held, job.training)
    cut = {"micro_batch_size": layout.micro_batch_size, "accumulation_steps": layout.accumulation_steps}
    return source.model_copy(update={"job": job, "world": source.world.model_copy(update=cut)})
