"""The one training loop: the same samples, losses and learning rates under every backend."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.backends.base import Batch, Engine, World
from harness.job.batch import BatchLayout
from harness.job.experiment import MeasureSection
from harness.job.job import Job
from harness.rank.checkpoint import CheckpointProbe
from harness.rank.data.samples import IGNORED, LABELS, Sampler, Samples, to_device
from harness.rank.events import EventWriter
from harness.rank.live.observer import Observer
from harness.rank.models.optimizer import learning_rate
from harness.rank.probes.probes import Probes
from harness.rank.probes.sketch import sketch
from harness.rank.probes.time import PhaseTimer
from harness.rank.probes.tracer import Tracer
from harness.rank.process.turns import Turns
from harness.record import OUTSIDE, DataPart, Window
from harness.run_directory.events import EvaluationEvent, ExaminedEvent, StepEvent
from harness.run_directory.rank_state import EVALUATION, TURN, PositionWriter

Sketches = dict[str, list[float]]


class Examination:
    """Of one step; both methods are collectives."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gradients: Sketches | None = None
        self._before: Sketches = {}

    def before_update(self) -> None:
        """Between the last backward pass and the update."""
        gradients = self._engine.full_gradients()
        if gradients is not None:
            self._gradients = {name: sketch(name, tensor) for name, tensor in gradients}
        self._before = self._weights()

    def after_update(self, step: int) -> ExaminedEvent:
        """Sketches of gradients (None: the engine cannot gather them) and updates, and norms of weights."""
        after = self._weights()
        return ExaminedEvent(
            step=step,
            gradients=self._gradients,
            updates={name: _difference(after[name], old) for name, old in self._before.items()},
            weight_norms={name: old[0] for name, old in self._before.items()},
        )

    def _weights(self) -> Sketches:
        return {name: sketch(name, tensor) for name, tensor in self._engine.full_parameters()}


def _difference(after: list[float], before: list[float]) -> list[float]:
    """Projections are linear; the norm of a difference is the root of their mean square."""
    projections = [a - b for a, b in zip(after[1:], before[1:], strict=True)]
    norm = (sum(value**2 for value in projections) / len(projections)) ** 0.5
    return [norm, *projections]


HASH_MODULUS = 2**64


class SampleHashes:
    """The samples of one step, by their ids; what a batch became on its way is in `rank/live/observer.py`."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._ids: list[int] = []

    def note(self, ids: Sequence[int]) -> None:
        """Remember the samples of a micro-batch that is about to be fed."""
        self._ids += ids

    def totals(self) -> dict[str, Any]:
        """Samples, tokens without padding, targets and the sum of the hashes, as events have them."""
        samples, ids = self._samples, self._ids
        hashes = sum(sample_hash(i, [tensor[i] for tensor in samples.fields.values()]) for i in ids)
        return {
            "samples": len(ids),
            "tokens": int(samples.lengths[ids].sum()),
            "target_tokens": int(samples.targets[ids].sum()),
            "sample_hashes": f"{hashes % HASH_MODULUS:016x}",
        }


def sample_hash(sample_id: int, values: Iterable[Tensor]) -> int:
    """64-bit hash of one sample: its id and what its fields contain, in their order, on the CPU."""
    digest = hashlib.blake2b(str(sample_id).encode(), digest_size=8)
    for value in values:
        digest.update(value.contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Everything that one rank needs to train; `run` does it."""

    job: Job
    layout: BatchLayout
    measure: MeasureSection
    world: World
    samples: Samples
    sampler: Sampler
    engine: Engine
    probes: Probes
    timer: PhaseTimer
    tracer: Tracer
    observer: Observer
    events: EventWriter
    position: PositionWriter
    checkpoint: CheckpointProbe | None = None
    """Saves a checkpoint after the probed steps; None: no checkpoint."""
    turns: Turns | None = None
    """None: timed steps are taken one after the other."""
    first_step: int = 0
    """Steps that the checkpoint which the run continues had taken."""
    examine_steps: Sequence[int] = ()
    """Steps to examine by parameter, the last of which ends the training; none: all steps are taken."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the training."""
        return training_steps(self.job, self.sampler)

    def window(self, step: int) -> Window:
        """Windows are counted from the first step that the run takes."""
        return self.measure.window(
            step - self.first_step, self.steps - self.first_step, discarded=self.tracer.discarded_steps
        )

    def run(self) -> None:
        """Train, writing one event per step and evaluation as they end."""
        self.engine.enter_phase = self.timer.enter
        every = self.job.evaluation.every_steps
        for step in range(self.first_step, self.steps):
            self._train_step(step)
            if self.examine_steps and step == max(self.examine_steps):
                break
            if every and (step + 1) % every == 0:
                self._evaluate(step + 1)
        self._trace(wanted=False)

    def _train_step(self, step: int) -> None:
        window = self.window(step)
        rate = learning_rate(step, self.steps, self.job.optimizer, self.job.schedule)
        global_targets = int(self.samples.targets[self.sampler.step_ids(step)].sum())
        hashes = SampleHashes(self.samples)
        self.position.begin_step(step)
        self.position.enter("data")
        self.observer.begin_step(step - self.first_step)
        self._trace(wanted=window == "traced")
        if self.turns is not None and window == "timed":
            self._take_turn(self.turns)
        self.probes.begin_step(step, window)
        self._synchronise()
        self.tracer.begin_step(step)
        begin = time.perf_counter()
        loss_sum, data_seconds = self._micro_steps(step, global_targets, hashes)
        self.probes.moment("after_backward")
        norm = self._update(step, rate)
        self._synchronise()
        seconds = time.perf_counter() - begin
        self.observer.enter(OUTSIDE)
        self.tracer.end_step()
        self.probes.moment("after_step")
        was_last_probed = self.probes.end_step()
        seen = self.observer.end_step(rate, step)
        # When the observer has let go of the batches.
        seen |= self.probes.step_memory()
        taken = StepEvent(
            step=step,
            window=window,
            loss_sum=float(loss_sum),
            gradient_norm=norm,
            learning_rate=rate,
            global_target_tokens=global_targets,
            **hashes.totals(),
            seconds=seconds,
            data_seconds=data_seconds,
            phase_seconds=self.timer.take(),
            **(self.observer.audit(self.engine, step) | seen),
        )
        self.events.write(taken)
        if was_last_probed:
            self._after_probed_steps(step + 1)

    def _take_turn(self, turns: Turns) -> None:
        """Before a timed step: wait if it begins another turn; the ranks then begin together."""
        if turns.is_over:
            self.position.enter(TURN)
            self._synchronise()
            self.probes.rest()
            self.events.write(turns.wait())
            dist.barrier()
            self.position.enter("data")
        turns.count()

    def _micro_steps(self, step: int, global_targets: int, hashes: SampleHashes) -> tuple[Tensor, float]:
        """Forward and backward passes of a step; the summed loss of this rank, and seconds of fetching."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        data_seconds = 0.0
        for micro_step in range(self.layout.accumulation_steps):
            last = micro_step == self.layout.accumulation_steps - 1
            self.probes.begin_micro_step(last=last)
            self._enter(None)
            fetch = time.perf_counter()
            batch = self._batch(step, micro_step, hashes)
            data_seconds += time.perf_counter() - fetch
            self._enter("forward")
            if last:
                self.probes.before_forward()
            loss = self.engine.forward(batch)
            if last:
                self.probes.moment("after_forward")
            self._enter("backward")
            # Engines average over data ranks, so this makes the gradient that of the mean per target.
            self.engine.backward(loss * (self.world.data_size / global_targets), last_micro_step=last)
            loss_sum += loss.detach().double()
        return loss_sum, data_seconds

    def _update(self, step: int, rate: float) -> float:
        """Clip and update; the gradient norm before clipping."""
        self._enter("step")
        examination = Examination(self.engine) if step in self.examine_steps else None
        if examination is not None:
            self.position.enter("examination")
        if examination is not None:
            examination.before_update()
        norm = self.engine.step(rate)
        if examination is not None:
            self.events.write(examination.after_update(step))
        self._enter(None)
        return norm

    def _after_probed_steps(self, steps_taken: int) -> None:
        """What is measured once, when the last probed step is over."""
        if self.job.evaluation.every_steps:
            self.position.enter(EVALUATION)
            self._evaluation_memory(steps_taken)
        if self.checkpoint is not None:
            self.position.enter("checkpoint")
            self.checkpoint.save(self.engine, self.probes, steps_taken)

    def probe_batch(self) -> Batch:
        """The first micro-batch that rank 0 trained on: the same on every rank."""
        ids = self.sampler.step_ids(0)[: self.layout.micro_batch_size]
        return to_device(self.samples.batch(ids), self.world.device)

    def _enter(self, phase: str | None) -> None:
        """A phase of the step begins; None: fetching a batch, or the end of the step."""
        self.position.enter(phase or "data")
        self.observer.enter(phase or "data")
        self.timer.enter(phase)
        self.tracer.enter(phase)
        if phase is not None:
            self.probes.phase(phase)

    def _trace(self, *, wanted: bool) -> None:
        """Turn the profiler on or off; the ranks meet, so that no step waits for another's profiler."""
        if wanted or self.tracer.at_work:
            self.position.enter("trace")
            if wanted:
                self.tracer.start()
            else:
                self.tracer.stop()
            dist.barrier()

    def _ids(self, step: int, micro_step: int) -> list[int]:
        """Of the samples that this rank takes."""
        return self.sampler.micro_batch_ids(
            step, micro_step, self.world.data_rank, self.world.data_size, self.layout
        )

    def _batch(self, step: int, micro_step: int, hashes: SampleHashes) -> Batch:
        ids = self._ids(step, micro_step)
        hashes.note(ids)
        return to_device(self.samples.batch(ids), self.world.device)

    @torch.no_grad()
    def _evaluate(self, steps_taken: int) -> None:
        """Every rank runs the same number of batches; a rank without samples masks what it runs."""
        self.engine.train(False)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        samples, targets = len(self.sampler.evaluation_ids), 0
        self._synchronise()
        begin = time.perf_counter()
        for start in range(0, samples, self.layout.micro_batch_size * self.world.data_size):
            self.position.enter(f"{EVALUATION}, sample {start}")
            batch, own_targets = self._evaluation_batch(start)
            with self.probes.counting("evaluation"):
                loss = self.engine.forward(batch).double()
            if own_targets:
                loss_sum += loss
            targets += own_targets
        self._synchronise()
        seconds = time.perf_counter() - begin
        self.engine.train(True)
        evaluated = EvaluationEvent(
            step=steps_taken,
            loss_sum=float(loss_sum),
            target_tokens=targets,
            samples=samples,
            seconds=seconds,
        )
        self.events.write(evaluated)

    @torch.no_grad()
    def _evaluation_memory(self, steps_taken: int) -> None:
        """One batch of an evaluation while memory is counted; later ones are as large and are not."""
        self.engine.train(False)
        with self.probes.memory_of("during_evaluation", steps_taken):
            batch, _ = self._evaluation_batch(0)
            with self.probes.counting("evaluation"):
                self.engine.forward(batch)
            del batch
        self.engine.train(True)

    def _evaluation_batch(self, start: int) -> tuple[Batch, int]:
        """This rank's part of the held-out samples from `start` on, and its target tokens."""
        size = self.layout.micro_batch_size
        ids = self.sampler.evaluation_ids
        mine = ids[start + self.world.data_rank * size :][:size]
        if self.job.task == "custom" or self.job.loss.factory is not None:
            # Nothing tells a loss of the user's own to leave samples out.
            batch = self.samples.batch(mine or ids[:1])
        else:
            batch = self.samples.batch((mine + ids[:1] * size)[:size])
            batch[LABELS][len(mine) :] = IGNORED
        return to_device(batch, self.world.device), int(self.samples.targets[mine].sum())

    def _synchronise(self) -> None:
        if self.world.device == "cuda":
            torch.cuda.synchronize()


def training_steps(job: Job, sampler: Sampler) -> int:
    """Optimizer steps that the job asks for, from steps or epochs."""
    from harness.job.job import DEFAULT_STEPS

    if job.training.epochs is None:
        return job.training.steps or DEFAULT_STEPS
    steps = job.training.epochs * sampler.training_count / sampler.global_batch_size
    return max(1, math.floor(steps))


def describe_data(samples: Samples, sampler: Sampler) -> DataPart:
    """Numbers about the data for the record."""
    return DataPart(
        samples=len(samples),
        training_samples=sampler.training_count,
        evaluation_samples=len(sampler.evaluation_ids),
        target_tokens=int(samples.targets.sum()),
        vocabulary_size=samples.facts.vocabulary_size,
        classes=samples.facts.classes,
        misplaced_labels=_misplaced_labels(samples),
    )


def _misplaced_labels(samples: Samples) -> int:
    """Labels of causal-lm that are not the token at their position."""
    tokens, labels = samples.fields.get("tokens"), samples.fields.get(LABELS)
    if tokens is None or labels is None or tokens.shape != labels.shape:
        return 0
    return int(((labels != IGNORED) & (labels != tokens)).sum())
