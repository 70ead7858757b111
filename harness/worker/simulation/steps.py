"""The steps of a simulated rank, in the order of `worker.loop`: the last one is counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.backends.base import Batch, Engine
from harness.forms.workload import ORDINARY_STEP
from harness.run_directory.request import RunRequest
from harness.worker.communication import CommunicationCounter
from harness.worker.memory_probe import MemoryProbe
from harness.worker.observer import Observer


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Everything that one simulated rank needs to train."""

    request: RunRequest
    engine: Engine
    counter: CommunicationCounter
    memory: MemoryProbe
    observer: Observer
    vocabulary_size: int

    def run(self) -> None:
        """Take steps up to the first ordinary one, and count that."""
        for step in range(ORDINARY_STEP):
            self._step(step, counted=False)
        self.counter.start()
        self.memory.begin()
        self._step(ORDINARY_STEP, counted=True)
        self.memory.end()
        self.counter.stop()

    def _step(self, step: int, *, counted: bool) -> None:
        self.observer.begin_step(ORDINARY_STEP)  # forgets the batches of the step before
        loss_sum = torch.zeros((), dtype=torch.float64)
        accumulation = self.request.accumulation_steps
        for micro_step in range(accumulation):
            last = micro_step == accumulation - 1
            self.counter.begin_micro_step(last=last)
            batch = self._batch()
            self.counter.phase = "forward"
            if counted and last:
                self.memory.before_forward()
            loss = self.engine.forward(batch)
            if counted and last:
                self.memory.record(step, "after_forward")
            self.counter.phase = "backward"
            self.engine.backward(loss * self._weight, last_micro_step=last)
            loss_sum += loss.detach().double()
        if counted:
            self.memory.record(step, "after_backward")
        self.counter.phase = "step"
        self.engine.step(self.request.job.optimizer.learning_rate)
        if counted:
            self.memory.record(step, "after_step")

    @property
    def _weight(self) -> float:
        """Of a sum over tokens, so that gradients are those of a mean."""
        run = self.request
        targets = run.micro_batch_size * (run.job.data.sequence_length - 1) * run.accumulation_steps
        return 1 / targets

    def _batch(self) -> Batch:
        """Tokens at random, as many as a full micro-batch has."""
        shape = (self.request.micro_batch_size, self.request.job.data.sequence_length)
        return {name: torch.randint(self.vocabulary_size, shape) for name in ("tokens", "labels")}
