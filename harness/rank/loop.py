"""The one training loop: the same samples, losses and learning rates under every backend."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import Batch, Engine
from harness.job.batch import BatchLayout
from harness.job.job import DEFAULT_STEPS, Job
from harness.rank.checkpoint import CheckpointProbe
from harness.rank.data import IGNORED, LABELS, Sampler, Samples, to_device
from harness.rank.instruments import Instruments, RankContext
from harness.rank.models.optimizer import learning_rate
from harness.rank.step_hooks import Step, StepHooks
from harness.record import OUTSIDE, DataPart, Window
from harness.run_directory.events import EvaluationEvent, StepEvent
from harness.run_directory.rank_state import EVALUATION

HASH_MODULUS = 2**64


def sample_facts(samples: Samples, ids: Sequence[int]) -> dict[str, Any]:
    """Samples that were fed, tokens without padding, targets and the sum of the hashes, as events have them.

    What a batch became on its way is in `rank/live/observer.py`.
    """
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

    rank: RankContext
    samples: Samples
    sampler: Sampler
    engine: Engine
    instruments: Instruments
    checkpoint: CheckpointProbe | None = None
    """Saves a checkpoint after the probed steps; None: no checkpoint."""

    @property
    def job(self) -> Job:
        return self.rank.request.job

    @cached_property
    def layout(self) -> BatchLayout:
        return self.rank.request.layout

    @property
    def first_step(self) -> int:
        """Steps that the checkpoint which the run continues had taken."""
        resume = self.rank.request.resume
        return resume.saved.step if resume else 0

    @property
    def steps(self) -> int:
        return training_steps(self.job, self.sampler)

    def window(self, step: int) -> Window:
        """Windows are counted from the first step that the run takes."""
        return self.rank.request.measure.window(
            step - self.first_step,
            self.steps - self.first_step,
            discarded=self.instruments.tracer.discarded_steps,
        )

    def run(self) -> None:
        """Train, writing one event per step and evaluation as they end."""
        hooks = self.instruments.around(self.engine, self.rank)
        every, examined = self.job.evaluation.every_steps, self.rank.request.examine_steps
        for step in range(self.first_step, self.steps):
            self._train_step(step, hooks)
            if self.instruments.probes.was_last_probed:
                self._after_probed_steps(step + 1)
            if examined and step == max(examined):
                break
            if every and (step + 1) % every == 0:
                self._evaluate(step + 1)
        hooks.finish()

    def _train_step(self, step: int, hooks: StepHooks) -> None:
        """One optimizer step, and its event with the facts of the instruments."""
        engine, world, fed = self.engine, self.rank.world, list[int]()
        rate = learning_rate(step, self.steps, self.job.optimizer, self.job.schedule)
        targets = int(self.samples.targets[self.sampler.step_ids(step)].sum())  # of all ranks
        loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
        window = self.window(step)
        hooks.prepare(Step(number=step, since_first=step - self.first_step, window=window, rate=rate))
        self._synchronise()
        hooks.begin()
        for micro_step in range(self.layout.accumulation_steps):
            last = micro_step == self.layout.accumulation_steps - 1
            hooks.enter("data", last=last)
            ids = self.sampler.micro_batch_ids(
                step, micro_step, world.data_rank, world.data_size, self.layout
            )
            batch = to_device(self.samples.batch(ids), world.device)
            hooks.enter("forward", last=last)
            loss = engine.forward(batch)
            hooks.enter("backward", last=last)
            # Engines average over data ranks, so this makes the gradient that of the mean per target.
            engine.backward(loss * (world.data_size / targets), last_micro_step=last)
            loss_sum += loss.detach().double()
            fed += ids
        del batch, loss  # memory is read from here on
        hooks.enter("step")
        norm = engine.step(rate)  # clips, then updates
        hooks.enter(OUTSIDE)
        self._synchronise()
        hooks.end()
        facts = hooks.facts()
        taken = StepEvent(
            step=step, window=window, loss_sum=float(loss_sum), gradient_norm=norm, learning_rate=rate,
            global_target_tokens=targets, **sample_facts(self.samples, fed), **facts,
        )  # fmt: skip
        self.rank.events.write(taken)

    def _after_probed_steps(self, steps_taken: int) -> None:
        """What is measured once, when the last probed step is over."""
        if self.job.evaluation.every_steps:
            self.rank.position.enter(EVALUATION)
            self._evaluation_memory(steps_taken)
        if self.checkpoint is not None:
            self.rank.position.enter("checkpoint")
            self.checkpoint.save(self.engine, self.instruments.probes, steps_taken)

    def probe_batch(self) -> Batch:
        """The first micro-batch that rank 0 trained on: the same on every rank."""
        ids = self.sampler.step_ids(0)[: self.layout.micro_batch_size]
        return to_device(self.samples.batch(ids), self.rank.world.device)

    @torch.no_grad()
    def _evaluate(self, steps_taken: int) -> None:
        """Every rank runs the same number of batches; a rank without samples masks what it runs."""
        self.engine.train(False)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.rank.world.device)
        samples, targets = len(self.sampler.evaluation_ids), 0
        self._synchronise()
        begin = time.perf_counter()
        for start in range(0, samples, self.layout.micro_batch_size * self.rank.world.data_size):
            self.rank.position.enter(f"{EVALUATION}, sample {start}")
            batch, own_targets = self._evaluation_batch(start)
            with self.instruments.probes.counting("evaluation"):
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
        self.rank.events.write(evaluated)

    @torch.no_grad()
    def _evaluation_memory(self, steps_taken: int) -> None:
        """One batch of an evaluation while memory is counted; later ones are as large and are not."""
        self.engine.train(False)
        with self.instruments.probes.memory_of("during_evaluation", steps_taken):
            batch, _ = self._evaluation_batch(0)
            with self.instruments.probes.counting("evaluation"):
                self.engine.forward(batch)
            del batch
        self.engine.train(True)

    def _evaluation_batch(self, start: int) -> tuple[Batch, int]:
        """This rank's part of the held-out samples from `start` on, and its target tokens."""
        size = self.layout.micro_batch_size
        ids = self.sampler.evaluation_ids
        mine = ids[start + self.rank.world.data_rank * size :][:size]
        if self.job.task == "custom" or self.job.loss.factory is not None:
            # Nothing tells a loss of the user's own to leave samples out.
            batch = self.samples.batch(mine or ids[:1])
        else:
            batch = self.samples.batch((mine + ids[:1] * size)[:size])
            batch[LABELS][len(mine) :] = IGNORED
        return to_device(batch, self.rank.world.device), int(self.samples.targets[mine].sum())

    def _synchronise(self) -> None:
        if self.rank.world.device == "cuda":
            torch.cuda.synchronize()


def training_steps(job: Job, sampler: Sampler) -> int:
    """Optimizer steps that the job asks for, from steps or epochs."""
    if job.training.epochs is None:
        return job.training.steps or DEFAULT_STEPS
    steps = job.training.epochs * sampler.training_count / sampler.global_batch_size
    return max(1, math.floor(steps))


def describe_data(samples: Samples, sampler: Sampler) -> DataPart:
    """Numbers about the data for the record."""
    tokens, labels = samples.fields.get("tokens"), samples.fields.get(LABELS)
    misplaced = 0  # labels of causal-lm that are not the token at their position
    if tokens is not None and labels is not None and tokens.shape == labels.shape:
        misplaced = int(((labels != IGNORED) & (labels != tokens)).sum())
    return DataPart(
        samples=len(samples),
        training_samples=sampler.training_count,
        evaluation_samples=len(sampler.evaluation_ids),
        target_tokens=int(samples.targets.sum()),
        vocabulary_size=samples.facts.vocabulary_size,
        classes=samples.facts.classes,
        misplaced_labels=misplaced,
    )
