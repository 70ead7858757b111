"""By which run of the reference a run is judged: one with its split, where the loss hangs on the split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from harness.backends.registry import REFERENCE
from harness.judge.noise import Noise, is_repetition, measure_noise
from harness.judge.resumed import from_step
from harness.judge.run import Run
from harness.record import Record
from harness.record.together import is_another_computation, samples_at_once


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What one run is held to."""

    reference: Run
    noise: Noise
    unjudged: str | None = None
    """Why its losses cannot be held to that; None: they can."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The reference of a job, its repetitions, and the noise of each that runs are judged by."""

    plain: Run
    repetitions: tuple[Run, ...]
    _known: dict[int, Yardstick] = field(default_factory=dict)
    """By samples at once."""

    @classmethod
    def of(cls, plain: Run, runs: Iterable[Run]) -> References:
        """`runs`: all of its job."""
        found = (run for run in runs if run is not plain and is_repetition(run.record))
        return cls(plain=plain, repetitions=tuple(run for run in found if run.record.resumed is None))

    def of_run(self, run: Run) -> Yardstick:
        """What a run is held to; the reference from the step on at which a resumed run began."""
        record, plain = run.record, self._with_noise(self.plain, self.plain)
        if run is self.plain or not is_another_computation(record, self.plain.record):
            return _from(plain, record)
        cut = self._cut(samples_at_once(record))
        if cut is None:
            return _from(replace(plain, unjudged=_why(record, self.plain.record)), record)
        # A loss that gathers what other ranks computed is that of the whole batch.
        return min((_from(cut, record), _from(plain, record)), key=lambda found: _gap(found, record))

    def _cut(self, samples: int) -> Yardstick | None:
        """The reference with as many samples at once; None: it did not run, or chance decides its losses."""
        split = self.plain.record.split
        if split is not None and split.is_random:
            return None
        label = f"{REFERENCE}:micro_batch_size={samples}"
        cuts = [r for r in self.repetitions if r.record.backend.label == label and r.record.status == "ok"]
        if not cuts:
            return None
        record = cuts[0].record.model_copy(update={"split": split})
        return self._with_noise(replace(cuts[0], record=record), cuts[0])

    def _with_noise(self, reference: Run, made: Run) -> Yardstick:
        samples = samples_at_once(reference.record)
        if samples not in self._known:
            others = [run.record for run in self.repetitions if run is not made]
            noise = measure_noise(reference.record, others)
            self._known[samples] = Yardstick(reference=reference, noise=noise)
        return self._known[samples]


def _from(found: Yardstick, record: Record) -> Yardstick:
    if record.resumed is None:
        return found
    reference = found.reference
    return replace(
        found, reference=replace(reference, record=from_step(reference.record, record.resumed.step))
    )


def _gap(found: Yardstick, record: Record) -> float:
    """How far the first losses lie apart: which of two losses was computed shows before any update."""
    here, there = (r.steps[0].loss if r.steps else None for r in (record, found.reference.record))
    return abs(here - there) if here is not None and there is not None else 0.0


SPLIT = "the loss depends on how the batch is split"


def _why(record: Record, reference: Record) -> str:
    text = f"{SPLIT}: {_last(record)}, {_last(reference)} in the reference"
    if reference.split is not None and reference.split.is_random:
        return f"{text}; it draws random numbers for each part"
    samples = samples_at_once(record)
    return f"{text}; no record of {REFERENCE}:micro_batch_size={samples}, which 'compare' runs for this"


def _last(record: Record) -> str:
    """'1.2345 in step 7 with 4 samples at once'."""
    loss = next((step.loss for step in reversed(record.steps) if step.loss is not None), None)
    at = record.steps[-1].step if record.steps else 0
    samples = samples_at_once(record)
    shown = f"{loss:.5g}" if loss is not None else "not finite"
    return f"{shown} in step {at} with {samples} sample{'s' if samples > 1 else ''} at once"
