"""Memory and communication of the probed steps; silent in every other step.

What the probes cost is measured by their own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from harness.backends.base import Engine
from harness.rank.live.observer import Observer
from harness.rank.probes.communication import CommunicationCounter, release_finished_collectives
from harness.rank.probes.device_memory import (
    AllocatorProbe,
    LiveBytes,
    host_peak_bytes,
    live_bytes_by_kind,
)
from harness.rank.probes.energy import EnergyMeter
from harness.rank.probes.process_memory import process_memory
from harness.rank.probes.time import PHASES, ProcessorAccount
from harness.rank.probes.tracer import Tracer
from harness.rank.shells import Instrument, Step
from harness.record import CommunicationPart, MemoryPart, Moment
from harness.run_directory.events import MeasuredEvent

LONGEST_HISTORY = 200_000
"""Allocations and frees that torch remembers, oldest dropped first."""


class Snapshot:
    """Records every allocation with its stack between `start` and `write`; CUDA only."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._recording = False

    def start(self) -> None:
        if not self._recording:
            torch.cuda.memory._record_memory_history(max_entries=LONGEST_HISTORY)
            self._recording = True

    def write(self) -> None:
        """Write the file and stop recording; does nothing before `start`."""
        if self._recording:
            torch.cuda.memory._dump_snapshot(str(self.file))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False


NO_BACKWARD = -1
"""What torch says of the backward pass that this thread is in if it is in none."""


class MemoryProbe:
    """Kinds are walked over the engine's tensors; the rest that the allocator serves is 'other'."""

    def __init__(
        self, allocator: AllocatorProbe, engine: Engine, data: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        self.allocator = allocator
        self.rows: list[dict[str, Any]] = []
        self._engine = engine
        self._data = data
        self._rest_before_forward: int | None = None
        self._gathered: list[int] = []
        self._hook: Any = None
        self._watching_seconds = 0.0

    def begin(self) -> None:
        """Start a probed step: peaks count from here."""
        self._hook = register_module_forward_hook(self._after_module)
        self.allocator.reset_peak()

    def end(self) -> float:
        """End a probed step, if one is going on; return the seconds spent on watching its modules."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        spent, self._watching_seconds = self._watching_seconds, 0.0
        return spent

    def before_forward(self) -> None:
        """Remember what is there before a forward pass, so that its activations can be identified."""
        self.allocator.wait_until_stable()
        live = self._live()
        self._rest_before_forward = _rest(self.allocator.allocated_bytes(), live)

    def record(self, step: int, moment: Moment) -> None:
        """Add a row for this moment and count peaks from here."""
        peak = self.allocator.peak_bytes()
        self.allocator.wait_until_stable()
        live = self._live()
        allocated = self.allocator.allocated_bytes()
        rest = _rest(allocated, live)
        kinds = None if live.inside is None else dict(live.inside)
        if kinds is not None and rest is not None:
            if moment == "after_forward" and self._rest_before_forward is not None:
                kinds["activations"] = rest - self._rest_before_forward
                rest = self._rest_before_forward
            kinds["other"] = rest
        self.rows.append(
            {
                "step": step,
                "moment": moment,
                "allocated_bytes": allocated,
                "peak_bytes": peak,
                "kinds": kinds,
                "outside_kinds": live.outside,
                "gathered_peak_bytes": max(self._gathered, default=None),
                "gathered_least_bytes": min(self._gathered, default=None),
                **process_memory(self.allocator),
            }
        )
        self._rest_before_forward = None
        self._gathered = []
        self.allocator.reset_peak()

    @contextmanager
    def span(self, step: int, moment: Moment) -> Iterator[None]:
        """Record what happens in between as one moment: its peak, and what lives at its end."""
        self.begin()
        try:
            yield
        finally:
            self.end()
        self.record(step, moment)

    def _live(self) -> LiveBytes:
        data = (("data", tensor) for tensor in self._data())
        engine = self._engine.state_tensors()
        first = next(engine, None)
        if first is None:  # a backend that names no tensors: its kinds are unknown, not zero
            return LiveBytes(inside=None, outside=None)
        live = live_bytes_by_kind(chain([first], engine, data), self.allocator)
        return live.with_inside(self._engine.hidden_bytes())

    def _after_module(self, module: nn.Module, *_: Any) -> None:
        """Weights are gathered while a module computes; its library's own hooks run after this one.

        Not in a backward pass that recomputes: libraries then gather ahead in both directions.
        """
        if torch.compiler.is_compiling():
            return  # of what a graph calls nothing stands between gathering and use
        if not module._parameters or torch._C._current_graph_task_id() != NO_BACKWARD:
            return
        begin = time.perf_counter()
        gathered = (("gathered", tensor) for tensor in self._engine.gathered_tensors())
        live = live_bytes_by_kind(gathered, self.allocator).inside or {}
        self._gathered.append(live.get("gathered", 0))
        self._watching_seconds += time.perf_counter() - begin


def _rest(allocated: int | None, live: LiveBytes) -> int | None:
    """What the allocator has served beyond the live tensors."""
    return None if allocated is None or live.inside is None else allocated - sum(live.inside.values())


class ProbedSteps:
    """What is counted in probed steps, whoever's loop takes them: attached to one engine."""

    def __init__(self, allocator: AllocatorProbe, counter: CommunicationCounter) -> None:
        self.allocator = allocator
        self.counter = counter
        self.timed_probes: set[str] = set()
        self.figures: dict[str, float | None] = {}
        """Figures of this rank by name, with the unit in it: `judge/facts.py` says what they are."""
        """Probes found at work in a timed step."""
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


class Probes(ProbedSteps, Instrument):
    """Of the harness's own loop."""

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
        super().__init__(allocator, counter)
        self._tracer = tracer
        self._observer = observer
        self.processors = ProcessorAccount()
        """Of the timed steps."""
        self.energy = energy
        """Of the timed steps; None: not measured."""
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
        self._memory = MemoryProbe(self.allocator, engine, data)
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
            if self.energy is not None:
                self.energy.poll()

    def rest(self) -> None:
        """Leave what follows, until the next timed step, out of what is counted over the timed steps."""
        self.processors.rest()
        if self.energy is not None:
            self.energy.rest()

    def enter(self, phase: str, *, last: bool) -> None:
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


class StepMemory(Instrument):
    """What is allocated at the end of each step that is not probed, and its peak.

    Outside of the observer, whose batches are gone when this is read.
    """

    def __init__(self, allocator: AllocatorProbe) -> None:
        self._allocator = allocator
        self._reads = False

    def prepare(self, step: Step) -> None:
        self._reads = step.window != "probed"

    def begin(self) -> None:
        if self._reads:
            self._allocator.reset_peak()

    def facts(self) -> dict[str, Any]:
        if not self._reads:
            return {}
        return {
            "allocated_bytes": self._allocator.allocated_bytes(),
            "peak_bytes": self._allocator.peak_bytes(),
        }
