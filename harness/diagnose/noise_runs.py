"""What counts as noise between two runs: the limits of `compare`, from records next to them or new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.backends.registry import REFERENCE
from harness.diagnose.pair import Run
from harness.errors import HarnessError
from harness.judge.noise import Limits, Noise, measure_noise
from harness.judge.parity import judge
from harness.judge.run import Run as JudgedRun
from harness.record import Record
from harness.record.record_files import RecordFiles
from harness.record.store import read_record


@dataclass(frozen=True, kw_only=True)
class NoiseRuns:
    """The reference of a job and its repetitions."""

    reference: Record | None
    """None: it could not be run here."""
    repeats: tuple[Record, ...]

    def noise(self, fallback: Record) -> Noise:
        """The limits of the job; without a reference the lower bounds, in the size of `fallback`."""
        return measure_noise(self.reference or fallback, self.repeats)

    def baseline(self, pair: tuple[Run, Run]) -> tuple[Run, Run]:
        """The pair with the run first that is the reference, else the only one that agrees with it."""
        for run, other in (pair, pair[::-1]):
            if run.record.backend.label == REFERENCE:
                return run, other
        noise = self.noise(pair[0].record)
        reference = JudgedRun.of(self.reference) if self.reference is not None else None
        judged = [judge(reference, JudgedRun.of(run.record), noise) for run in pair]
        agrees = [judgement.parity in _AGREES for judgement in judged]
        return (pair[1], pair[0]) if agrees == [False, True] else pair

    def derivation(self, baseline: Record) -> tuple[str, ...]:
        """Where the limits come from, one sentence each."""
        sentences = self.noise(baseline).derivation
        if baseline.backend.label == REFERENCE:
            return sentences
        return (
            *sentences,
            "twice as much between two runs: each may differ that much from the reference",
        )

    def limits(self, baseline: Record, other: Record) -> Limits:
        """What rounding explains between the baseline and another run.

        Each of two runs may lie as far from the reference as `compare` allows, so as far as both together
        from each other.
        """
        noise = self.noise(baseline)
        if baseline.backend.label == REFERENCE:
            return noise.widest(other)
        return sum_of(noise.widest(baseline), noise.widest(other))


_AGREES = ("exact", "tight", "band")


def sum_of(left: Limits, right: Limits) -> Limits:
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
    pair: tuple[Run, Run], labels: Sequence[str], run_missing: Callable[[list[str]], list[Record]]
) -> NoiseRuns:
    """The reference and its repetitions: of the pair, of the folders around it, and the rest run now."""
    known = _records_nearby(pair)
    missing = [label for label in labels if label not in {record.backend.label for record in known}]
    if missing:
        known += run_missing(missing)
    reference = next((record for record in known if record.backend.label == REFERENCE), None)
    return NoiseRuns(reference=reference, repeats=tuple(r for r in known if r is not reference))


def _records_nearby(pair: tuple[Run, Run]) -> list[Record]:
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
        and record.job_id == job_id
        and record.world.device == device
        and record.environment.code in codes
    ]
