"""Measures memory and communication in probed steps, and nothing in the others.

What the probes cost is measured by their own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from harness.backends.base import Engine
from harness.rank.live.observer import Observer
from harness.rank.probes.communication import CommunicationCounter, release_finished_collectives
from harness.rank.probes.energy import DeviceEnergy
from harness.rank.probes.memory import AllocatorProbe, MemoryProbe, Snapshot, host_peak_bytes
from harness.rank.probes.time import PHASES, ProcessorAccount
from harness.rank.probes.tracer import Tracer
from harness.rank.step_hooks import Step, StepHook
from harness.record import CommunicationPart, MemoryPart, Moment
from harness.run_directory.events import MeasuredEvent


class ProbedSteps:
    """What is counted in probed steps, whoever's loop takes them: attached to one engine."""

    def __init__(self, allocator: AllocatorProbe, counter: CommunicationCounter) -> None:
        self.allocator = allocator
        self.counter = counter
        self.timed_probes: set[str] = set()
        """Probes found at work in a timed step."""
        self.figures: dict[str, float | None] = {}
        """Figures of this rank by name, with the unit in it: `judge/facts.py` says what they are."""
        self._memory: MemoryProbe | None = None
        self._step: int | None = None
        self._probed_steps = 0
        self._seconds: dict[str, float] = {}

    @property
    def memory(self) -> list[dict[str, Any]]:
        """One row per moment, in the form of `record.MemoryPart`."""
        return self._memory.rows if self._memory else []

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

    def found_in_timed_step(self, **at_work: bool) -> None:
        """Remember which probes, by name, are at work in a timed step."""
        self.timed_probes |= {name for name, is_at_work in at_work.items() if is_at_work}

    def measured(
        self, rank: int, *, seconds: Mapping[str, float] | None = None, **more: Any
    ) -> MeasuredEvent:
        """All that was counted so far. seconds: of other probes, per step; more: fields that those fill."""
        own = {name: spent / self._probed_steps for name, spent in self._seconds.items()}
        return MeasuredEvent(
            memory=[MemoryPart(**row) for row in self.memory],
            communication=[CommunicationPart(rank=rank, **row) for row in self.counter.rows()],
            early_reduced_bytes=self.counter.early_reduced_bytes,
            probe_seconds=own | dict(seconds or {}),
            timed_probes=sorted(self.timed_probes),
            reserved_bytes=self.allocator.reserved_peak_bytes(),
            num_alloc_retries=self.allocator.allocation_retries(),
            host_peak_bytes=host_peak_bytes(),
            figures=self.figures,
            **more,
        )

    @contextmanager
    def _costing(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._add_cost(name, time.perf_counter() - begin)

    def _add_cost(self, name: str, seconds: float) -> None:
        if self._probed_steps:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds


class Probes(ProbedSteps, StepHook):
    """Of the harness's own loop."""

    def __init__(
        self,
        allocator: AllocatorProbe,
        counter: CommunicationCounter,
        tracer: Tracer,
        observer: Observer,
        *,
        reads_energy: bool = False,
        probed_steps: int = 0,
        snapshot: Snapshot | None = None,
    ) -> None:
        super().__init__(allocator, counter)
        self._tracer = tracer
        self._observer = observer
        self.processors = ProcessorAccount()
        """Of the timed steps."""
        self._reads_energy = reads_energy
        self.energy: DeviceEnergy | None = None
        """Since the first timed step; None: not read."""
        self._snapshot = snapshot
        self._wanted_steps = probed_steps
        self._counter_seconds = 0.0
        self.was_last_probed = False
        """Whether the last step was the last probed one."""

    @property
    def within_probed_step(self) -> bool:
        """Whether a probed step is under way."""
        return self._step is not None

    def attach(self, engine: Engine, data: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Read the memory of this engine; `data` yields what the samples keep in memory."""
        self._memory = MemoryProbe(self.allocator, engine, lambda: (("data", held) for held in data()))
        self._memory.record(0, "after_setup")

    def prepare(self, step: Step) -> None:
        """Memory and communication are recorded in the probed window alone."""
        probed = step.window == "probed"
        self._step = step.number if probed else None
        if probed:
            release_finished_collectives()
            self._probed_steps += 1
            if self._snapshot:
                self._snapshot.start()
            self.counter.start()
            self._counter_seconds = self.counter.seconds
            if self._memory:
                self._memory.begin()
        elif step.window != "warmup":
            self.allocator.relax()  # the probed steps are over
        if step.window == "timed":
            self.found_in_timed_step(
                counter=self.counter.at_work,
                allocator=self.allocator.at_work,
                tracer=self._tracer.at_work,
                observer=self._observer.looks_closely,
            )
            self.processors.begin()
            if self._reads_energy and self.energy is None:
                self.energy = DeviceEnergy.of_this_rank()

    def rest(self) -> None:
        """Leave what follows, until the next timed step, out of what is counted over the timed steps."""
        self.processors.rest()

    def enter(self, phase: str, last: bool) -> None:
        """Read memory at the borders of the last micro-step; name what collectives from here on belong to."""
        if phase == "data":
            self.counter.begin_micro_step(last=last)
        elif phase == "backward" and last:
            self.moment("after_forward")
        elif phase == "step":
            self.moment("after_backward")
        if phase in PHASES:
            self.counter.phase = phase
        if phase == "forward" and last:
            self.before_forward()

    def facts(self) -> dict[str, Any]:
        """End the step: what was probed is in an event of its own."""
        self.moment("after_step")
        self.was_last_probed = self._step is not None and self._probed_steps == self._wanted_steps
        if self._step is not None:
            self._add_cost("counter", self.counter.seconds - self._counter_seconds)
        self.counter.stop()
        if self._memory:
            self._add_cost("memory_gathered", self._memory.end())
        if self.was_last_probed and self._snapshot:
            self._snapshot.write()
        self._step = None
        return {}

    def counting(self, phase: str) -> AbstractContextManager[None]:
        """Count the collectives of something outside the steps, such as an evaluation, as `phase`."""
        return self.counter.counting(phase)

    def memory_of(self, moment: Moment, steps_taken: int) -> AbstractContextManager[None]:
        """Record the memory of something outside the steps, while the allocator still counts."""
        return self._memory.span(steps_taken, moment) if self._memory else nullcontext()
