"""Memory and communication of the probed steps; silent in every other step.

What the probes cost is measured by their own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from harness.backends.base import Engine
from harness.record import Moment, Window
from harness.worker.communication import CommunicationCounter
from harness.worker.energy import EnergyMeter
from harness.worker.finished_collectives import release_finished_collectives
from harness.worker.memory import AllocatorProbe
from harness.worker.memory_probe import MemoryProbe
from harness.worker.observer import Observer
from harness.worker.processor_account import ProcessorAccount
from harness.worker.snapshot import Snapshot
from harness.worker.tracer import Tracer


class Probes:
    """Attached to one engine; the loop says which step and phase it is in."""

    def __init__(
        self,
        allocator: AllocatorProbe,
        counter: CommunicationCounter,
        tracer: Tracer,
        observer: Observer,
        energy: EnergyMeter | None = None,
        *,
        probed_steps: int = 0,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.allocator = allocator
        self.counter = counter
        self._tracer = tracer
        self._observer = observer
        self.processors = ProcessorAccount()
        """Of the timed steps."""
        self.energy = energy
        """Of the timed steps; None: not measured."""
        self.timed_probes: set[str] = set()
        """Probes found at work in a timed step."""
        self._memory: MemoryProbe | None = None
        self._snapshot = snapshot
        self._seconds: dict[str, float] = {}
        self._wanted_steps = probed_steps
        self._probed_steps = 0
        self._counter_seconds = 0.0
        self._step: int | None = None

    @property
    def within_probed_step(self) -> bool:
        """Whether a probed step is under way."""
        return self._step is not None

    def attach(self, engine: Engine, data: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Read the memory of this engine; `data` yields what the samples keep in memory."""
        self._memory = MemoryProbe(self.allocator, engine, data)
        self._memory.record(0, "after_setup")

    @property
    def memory(self) -> list[dict[str, Any]]:
        """One row per moment, in the form of `record.MemoryPart`."""
        return self._memory.rows if self._memory else []

    def begin_step(self, step: int, window: Window) -> None:
        """Start a step; memory and communication are recorded only in the probed window."""
        probed = window == "probed"
        self._step = step if probed else None
        if probed:
            release_finished_collectives()
            self._probed_steps += 1
            if self._snapshot:
                self._snapshot.start()
            self.counter.start()
            self._counter_seconds = self.counter.seconds
            if self._memory:
                self._memory.begin()
        elif window != "warmup":
            self.allocator.release()  # the probed steps are over
        if window == "timed":
            at_work = {
                "counter": self.counter.at_work,
                "allocator": self.allocator.at_work,
                "tracer": self._tracer.at_work,
                "observer": self._observer.looks_closely,
            }
            self.timed_probes |= {name for name, is_at_work in at_work.items() if is_at_work}
            self.processors.begin()
            if self.energy is not None:
                self.energy.poll()

    def begin_micro_step(self, *, last: bool) -> None:
        """Tell the counter whether this micro-step is the last of its step."""
        self.counter.begin_micro_step(last=last)

    def phase(self, name: str) -> None:
        """Name what the collectives from here on belong to."""
        self.counter.phase = name

    def counting(self, phase: str) -> AbstractContextManager[None]:
        """Count the collectives of something outside the steps, such as an evaluation, as `phase`."""
        return self.counter.counting(phase)

    def before_forward(self) -> None:
        """In a probed step, separate the coming forward pass from what is already there."""
        if self._step is not None and self._memory is not None:
            with self._costing("memory_walk"):
                self._memory.before_forward()

    def moment(self, name: Moment) -> None:
        """Record allocated, peak and live bytes at this moment of a probed step."""
        if self._step is not None and self._memory is not None:
            with self._costing("memory_walk"):
                self._memory.record(self._step, name)

    def end_step(self) -> bool:
        """End a step; True if it was the last probed one."""
        last_probed = self._step is not None and self._probed_steps == self._wanted_steps
        if self._step is not None:
            self._add_cost("counter", self.counter.seconds - self._counter_seconds)
        self.counter.stop()
        if self._memory:
            self._add_cost("memory_gathered", self._memory.end())
        if last_probed and self._snapshot:
            self._snapshot.write()
        self._step = None
        return last_probed

    def memory_of(self, moment: Moment, steps_taken: int) -> AbstractContextManager[None]:
        """Record the memory of something outside the steps, while the allocator still counts."""
        return self._memory.span(steps_taken, moment) if self._memory else nullcontext()

    def seconds_per_step(self) -> dict[str, float]:
        """What each probe cost by its own clock, per probed step."""
        return {name: seconds / self._probed_steps for name, seconds in self._seconds.items()}

    @contextmanager
    def _costing(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._add_cost(name, time.perf_counter() - begin)

    def _add_cost(self, name: str, seconds: float) -> None:
        if self._probed_steps:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
