"""Memory and collectives of the probed steps of an observed script."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from harness.backends.base import Engine
from harness.forms.terms import SCALAR_BYTES, may_reduce
from harness.rank.probes.communication import CollectiveKey, CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, CudaAllocatorProbe, MemoryProbe
from harness.rank.probes.probes import ProbedSteps
from harness.record import Window

BETWEEN = "between"
"""Phase of what a script does between an update and the next forward pass."""


class Probing(ProbedSteps):
    """Counts in the probed steps and until the first step begins; silent otherwise."""

    def __init__(self, counter: CommunicationCounter, allocator: AllocatorProbe) -> None:
        super().__init__(allocator, counter)
        self._is_over = False
        self._elements = self._exchanged = 0
        self._mean_elements = 0.0
        self._known: dict[CollectiveKey, int] = {}
        self._later: CommunicationCounter | None = None
        self._has_synchronised = False

    def attach(self, engine: Engine | None, elements: int) -> None:
        """Read the memory of this engine from now on; None: nothing could be recognised.

        elements: of the model, which train.
        """
        if engine is None:
            return
        weights = list(_parameters(engine))
        self._elements, self._mean_elements = elements, elements / max(1, len(weights))
        if any(weight.device.type == "cuda" for weight in weights):
            self.allocator.relax()
            self.allocator = CudaAllocatorProbe()
        self._memory = MemoryProbe(self.allocator, engine)

    def begin_step(self, step: int, window: Window) -> bool:
        """Start a step; True if it is the first after the probed ones."""
        probed = window == "probed"
        self._step = step if probed else None
        if probed:
            self._probed_steps += 1
            if not self.counter.at_work:
                self.counter.start()
            if self._memory:
                self._memory.begin()
            return False
        self.counter.stop()
        if window == "warmup":
            return False
        ended_now = not self._is_over
        if ended_now:
            self._is_over = True
            self.allocator.relax()
            if self._looks_on() and dist.is_initialized() and dist.get_world_size() > 1:
                self._later = CommunicationCounter()
                self._later.phase = BETWEEN
                self._known.clear()
                self._later.start()
        if window == "timed":
            self.found_in_timed_step(counter=self.counter.at_work, allocator=self.allocator.at_work)
        return ended_now

    def end_step(self) -> None:
        """The update is over and gradients are zeroed, where the script zeroes them now."""
        self.moment("after_step")
        if self._step is not None and self._memory is not None:
            self._add_cost("memory_gathered", self._memory.end())
        if self._step is not None:
            self._add_cost("counter", self.counter.seconds)
            self.counter.seconds = 0.0
        self._step = None

    def has_synchronised(self) -> bool:
        """Whether ranks whose passes exchange nothing have sent a byte of each weight between steps.

        Looked for until it has happened, also after the probed steps. True once. What calls of one kind send
        counts from the first one on that is as large as weights on the mean: numbers that a script gathers
        for its log are not.
        """
        if (self._is_over and self._later is None) or not self._looks_on():
            return False
        for key, count in (self._later or self.counter).counts.items():
            sent = count.payload_bytes - self._known.get(key, 0)
            self._known[key] = count.payload_bytes
            if key.phase == BETWEEN and count.largest_bytes >= self._mean_elements:
                self._exchanged += sent
        if self._exchanged < self._elements:
            return False
        if self._later is not None:
            self._later.stop()
        self._has_synchronised = True
        return True

    def _looks_on(self) -> bool:
        return not (self._has_synchronised or self._elements == 0) and all(
            count.largest_bytes <= SCALAR_BYTES or not may_reduce(key.phase, key.op)
            for key, count in self.counter.counts.items()
        )


def _parameters(engine: Engine) -> Iterator[Tensor]:
    return (tensor for kind, tensor in engine.state_tensors() if kind == "weights")
