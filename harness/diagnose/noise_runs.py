"""The reference of a pair's job and its repetitions: what noise is, and which run is the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.backends.registry import REFERENCE
from harness.diagnose.pair import LoadedRun
from harness.diagnose.rerun import Say, reference_labels
from harness.errors import HarnessError
from harness.judge.agreement.noise import Noise, NormShift, Tolerance, measure_noise
from harness.judge.agreement.parity import judge
from harness.judge.quantities import Run as JudgedRun
from harness.record import Record
from harness.record.store import RecordFiles, read_record
from harness.record.workload import depends_on_split, is_another_computation


@dataclass(frozen=True, kw_only=True)
class NoiseRuns:
    """The reference of a job and its repetitions."""

    reference: Record | None
    """None: it could not be run here."""
    repeats: tuple[Record, ...]

    @property
    def label(self) -> str:
        """Of the run that others are held to."""
        return self.reference.backend.label if self.reference is not None else REFERENCE

    def noise(self, fallback: Record) -> Noise:
        """The limits of the job; without a reference the lower bounds, in the size of `fallback`."""
        return measure_noise(self.reference or fallback, self.repeats)

    def baseline(self, pair: tuple[LoadedRun, LoadedRun]) -> tuple[LoadedRun, LoadedRun]:
        """The pair with the run first that is the reference, else the only one that agrees with it."""
        for run, other in (pair, pair[::-1]):
            if run.record.backend.label == self.label:
                return run, other
        noise = self.noise(pair[0].record)
        reference = JudgedRun.of(self.reference) if self.reference is not None else None
        judged = [judge(reference, JudgedRun.of(run.record), noise) for run in pair]
        agrees = [judgement.parity in _AGREES for judgement in judged]
        return (pair[1], pair[0]) if agrees == [False, True] else pair

    def derivation(self, baseline: Record) -> tuple[str, ...]:
        """Where the limits come from, one sentence each."""
        sentences = self.noise(baseline).derivation
        if baseline.backend.label == self.label:
            return sentences
        return (
            *sentences,
            "twice as much between two runs: each may differ that much from the reference",
        )

    def limits(self, baseline: Record, other: Record) -> Tolerance:
        """What rounding explains between the baseline and another run.

        Each of two runs may lie as far from the reference as `compare` allows, so as far as both together
        from each other.
        """
        noise = self.noise(baseline)
        if baseline.backend.label == self.label:
            return noise.widest(other)
        return sum_of(noise.widest(baseline), noise.widest(other))

    def norm_shift(self, baseline: Record, other: Record) -> NormShift | None:
        """A factor on gradients that no single step shows, of a run beside the reference."""
        return self.noise(baseline).norm_shift(other) if baseline.backend.label == self.label else None


_AGREES = ("exact", "tight", "band")


def sum_of(left: Tolerance, right: Tolerance) -> Tolerance:
    """Limits added up, of the parameters that both have."""
    values: dict[str, Any] = {
        field.name: getattr(left, field.name) + getattr(right, field.name)
        for field in fields(left)
        if field.name != "parameters"
    }
    both = left.parameters.keys() & right.parameters.keys()
    return replace(
        left, **values, parameters={name: left.parameters[name] + right.parameters[name] for name in both}
    )


def find_noise_runs(
    pair: tuple[LoadedRun, LoadedRun],
    labels: Callable[[Record | None], Sequence[str]],
    run_missing: Callable[[list[str]], list[Record]],
) -> NoiseRuns:
    """The reference and its repetitions: of the pair, of the folders around it, and the rest run now.

    `labels`: which, by the plain reference; the first is what the pair is held to.
    """
    known = _records_nearby(pair)

    def add(wanted: Sequence[str]) -> None:
        missing = [label for label in wanted if label not in {record.backend.label for record in known}]
        if missing:
            known.extend(run_missing(missing))

    def labelled(label: str) -> Record | None:
        return next((record for record in known if record.backend.label == label), None)

    add([REFERENCE])
    plain = labelled(REFERENCE)
    wanted = labels(plain)
    add(wanted)
    reference = labelled(wanted[0])
    repeats = [record for record in known if record is not reference] if reference is not None else []
    if reference is not None and reference is not plain and plain is not None:
        reference = reference.model_copy(update={"split": plain.split})
        repeats = [record for record in repeats if not is_another_computation(record, reference)]
    return NoiseRuns(reference=reference, repeats=tuple(repeats))


def recorded_noise(pair: tuple[LoadedRun, LoadedRun]) -> NoiseRuns:
    """The reference of the first run's job and its repetitions, as far as they lie beside the pair.

    Raises HarnessError for two runs that a loss which hangs on the split of a batch makes two computations.
    """

    def labels(plain: Record | None) -> Sequence[str]:
        if plain is None or not depends_on_split(plain):
            return [REFERENCE]
        return reference_labels(plain, [run.record for run in pair])

    return find_noise_runs(pair, labels, lambda _: [])


def in_one_split(
    pair: tuple[LoadedRun, LoadedRun], noise_runs: NoiseRuns, say: Say
) -> tuple[LoadedRun, LoadedRun]:
    """The pair, with the plain reference replaced by the one that takes as many samples at once."""
    reference = noise_runs.reference
    if reference is None or reference.backend.label == REFERENCE:
        return pair
    found: list[LoadedRun] = []
    for run in pair:
        if run.record.backend.label == REFERENCE:
            instead = f"{reference.backend.label} stands for {REFERENCE}"
            say(f"the loss depends on how the batch is split: {instead}")
            run = LoadedRun(path=run.path, record=reference)
        found.append(run)
    return found[0], found[1]


def _records_nearby(pair: tuple[LoadedRun, LoadedRun]) -> list[Record]:
    """Runs of the reference of this job by the same code on the same kind of device, the pair's own first."""
    found = {run.path: run.record for run in pair}
    files = RecordFiles()
    for run in pair:
        for path in files.of_runs(run.path.parent.parent):
            if f"-{REFERENCE}-n1-" not in path.parent.name:
                continue
            try:
                found.setdefault(path.resolve(), read_record(path, files))
            except HarnessError:
                continue  # a damaged record of another run does not concern this pair
    job_id, device = pair[0].record.job_id, pair[0].record.world.device
    codes = {run.record.environment.code for run in pair}
    return [
        record
        for record in found.values()
        if record.backend.name == REFERENCE
        and record.status == "ok"
        and record.resumed is None
        and record.job_id == job_id
        and record.world.device == device
        and record.environment.code in codes
    ]
