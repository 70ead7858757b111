"""Explains how two runs differ: from the records first, then from the step in which they diverge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.backends.registry import REFERENCE
from harness.diagnose.noise_runs import NoiseRuns, find_noise_runs
from harness.diagnose.pair import Run
from harness.diagnose.records import (
    about_job,
    about_replicas,
    about_reports,
    about_settings,
    how_far,
    steps_to_examine,
)
from harness.diagnose.rerun import (
    Rerun,
    Say,
    experiment_of,
    reference_labels,
    require_room,
    rerun,
    run_references,
)
from harness.diagnose.tensors import TensorNoise
from harness.diagnose.verdict import StepVerdict, first_parting_step, sentences
from harness.judge.distance import Distance, distance
from harness.judge.effective import SettingDifference, setting_differences
from harness.judge.job_equivalence import Difference, job_differences
from harness.judge.noise import Limits, measure_noise
from harness.judge.parity import first_divergent_step
from harness.launch.launcher import LocalLauncher, modules_to_preload
from harness.record import Record

CLEAN = "no difference beyond noise"
PARTED = "the runs differ beyond noise"
NOT_RERUN = "an observed script is not run again, so no tensors were compared"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is known of two runs; the baseline is the one that the other is compared with."""

    baseline: Run
    other: Run
    found: Distance
    limits: Limits
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
    explanation: list[str]

    def as_json(self) -> dict[str, Any]:
        """The document of `diagnose --json`, but for the runs as they were given."""
        return {
            "step": self.verdict.step if self.verdict else None,
            "said": self.explanation,
            "verdict": CLEAN if self.clean else PARTED,
            "baseline": self.baseline.record.run_id,
            "parting_step": self.parting_step,
            "distances": asdict(self.found),
            "limits": asdict(self.limits),
            "noise": list(self.derivation),
            "beyond": {name: list(values) for name, values in self.beyond.items()},
            "same_job": [difference.as_json() for difference in self.same_job],
            "settings": [difference.as_json() for difference in self.settings],
            "tensors": asdict(self.verdict) if self.verdict else None,
        }


def diagnose(pair: tuple[Run, Run], say: Say) -> Diagnosis:
    """Compare the records within the noise of their job; if they differ, rerun and compare by parameter.

    Raises HarnessError where a run that is needed cannot be made on this machine.
    """
    if any(run.is_script for run in pair):
        return _of_records(pair)
    some = pair[0].record
    labels = reference_labels(pair[0].record, pair[1].record)
    launcher = LocalLauncher(
        some.world.device,
        modules_to_preload(experiment_of(some), [*labels, *(run.record.backend.label for run in pair)]),
    )
    noise_runs = find_noise_runs(pair, labels, lambda missing: run_references(some, missing, launcher, say))
    baseline, other = noise_runs.baseline(pair)
    limits = noise_runs.limits(baseline.record, other.record)
    found = distance(baseline.record, other.record)
    beyond = limits.exceeded(found)
    same_job = job_differences(baseline.record, other.record)
    settings = setting_differences(baseline.record, other.record)
    parting = first_divergent_step(baseline.record, other.record, limits)
    replicas = [text for run in (baseline, other) for text in about_replicas(run)]
    clean = not (beyond or same_job or replicas or parting is not None)
    causes = [
        *about_job(same_job, other),
        *about_settings(settings, baseline, other, clean=clean),
    ]
    explanation = [how_far(found, limits)]
    verdict = None
    if clean:
        explanation += causes
    else:
        causes += [*replicas, *about_reports(baseline, other, limits)]
        reruns = _rerun_all(baseline, other, noise_runs, parting, launcher, say)
        verdict = first_parting_step(
            reruns[0].examined, reruns[1].examined, _noise(reruns, baseline, noise_runs)
        )
        explanation += [*causes, *_unlike_records((baseline, other), reruns[:2], limits)]
        explanation += sentences(verdict, other.record.world, beyond=beyond, explained=bool(causes))
    return Diagnosis(
        baseline=baseline, other=other, found=found, limits=limits,
        derivation=noise_runs.derivation(baseline.record), same_job=same_job, settings=settings,
        beyond=beyond, clean=clean, parting_step=parting, verdict=verdict, explanation=explanation,
    )  # fmt: skip


def _of_records(pair: tuple[Run, Run]) -> Diagnosis:
    """What the records alone say: an observed script is not run again."""
    baseline, other = sorted(pair, key=lambda run: run.is_script)
    noise = measure_noise(baseline.record, ())
    limits = noise.widest(other.record)
    found = distance(baseline.record, other.record)
    beyond = limits.exceeded(found)
    # Of a script's job only a part is known, so that its id is always another.
    same_job = [d for d in job_differences(baseline.record, other.record) if d.field != "job_id"]
    settings = setting_differences(baseline.record, other.record)
    parting = first_divergent_step(baseline.record, other.record, limits)
    replicas = [text for run in (baseline, other) for text in about_replicas(run)]
    clean = not (beyond or same_job or replicas or parting is not None)
    explanation = [how_far(found, limits)]
    if parting is not None:
        explanation.append(f"the records part in step {parting}")
    explanation += about_job(same_job, other)
    explanation += about_settings(settings, baseline, other, clean=clean)
    if not clean:
        explanation += [*replicas, *about_reports(baseline, other, limits), NOT_RERUN]
    return Diagnosis(
        baseline=baseline, other=other, found=found, limits=limits, derivation=noise.derivation,
        same_job=same_job, settings=settings, beyond=beyond, clean=clean, parting_step=parting, verdict=None,
        explanation=explanation,
    )  # fmt: skip


def _rerun_all(
    baseline: Run, other: Run, noise_runs: NoiseRuns, parting: int | None, launcher: LocalLauncher, say: Say
) -> list[Rerun]:
    """The baseline, the other, and the runs of the reference that are not the baseline."""
    last = min(len(run.record.steps) for run in (baseline, other)) - 1
    steps = steps_to_examine(parting, last)
    wanted: list[Record] = [baseline.record, other.record]
    wanted += [r for r in _references(noise_runs) if r is not baseline.record]
    for record in wanted:
        require_room(record)
    return [rerun(record, steps, launcher, say) for record in wanted]


def _references(noise_runs: NoiseRuns) -> list[Record]:
    """The reference and one repetition of each kind."""
    runs = [noise_runs.reference] if noise_runs.reference else []
    return list({record.backend.label: record for record in (*noise_runs.repeats, *runs)}.values())


def _noise(reruns: Sequence[Rerun], baseline: Run, noise_runs: NoiseRuns) -> dict[int, TensorNoise]:
    """By step, what the reference's repetitions make of noise; without a reference, the lower bounds."""
    is_reference = baseline.record.backend.label == REFERENCE
    made = [reruns[0], *reruns[2:]] if is_reference else reruns[2:]
    by_label = {run.record.backend.label: run for run in made}
    reference = by_label.get(REFERENCE, reruns[0])
    repeats = [run for run in by_label.values() if run is not reference]
    return {
        step: TensorNoise(
            reference=examined,
            splits=[r.examined[step] for r in repeats if "precision" not in _options(r)],
            others=[r.examined[step] for r in repeats if "precision" in _options(r)],
            precision=baseline.record.job.training.precision,
            factor=1.0 if is_reference else 2.0,
        )
        for step, examined in reference.examined.items()
    }


def _options(run: Rerun) -> list[str]:
    return [name for name, value in run.record.backend.options.items() if value is not None]


def _unlike_records(runs: Sequence[Run], reruns: Sequence[Rerun], limits: Limits) -> list[str]:
    """That a rerun does not repeat its record, so that what follows is of other code or another machine."""
    sentences = []
    for run, again in zip(runs, reruns, strict=True):
        step = first_divergent_step(run.record, again.record, limits)
        if step is not None:
            sentences.append(
                f"the rerun of {run.name} diverges from its record at step {step}: code, versions or machine "
                "have changed since; what follows is about the reruns"
            )
    return sentences
