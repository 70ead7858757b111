"""Memory and communication of the probed steps; silent in every other step.

What the probes cost is measured by their own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from harness.backends import registry
from harness.backends.base import Engine, World
from harness.rank.events import EventWriter
from harness.rank.factories import brought_packages
from harness.rank.live.observer import Observer
from harness.rank.probes.communication import CommunicationCounter, release_finished_collectives
from harness.rank.probes.device_memory import (
    AllocatorProbe,
    LiveBytes,
    allocator_probe,
    host_peak_bytes,
    live_bytes_by_kind,
)
from harness.rank.probes.energy import EnergyMeter
from harness.rank.probes.process_memory import process_memory
from harness.rank.probes.time import ProcessorAccount
from harness.rank.probes.tracer import Tracer
from harness.rank.process.environment import keep_freed_memory
from harness.record import CommunicationPart, MemoryPart, Moment, OverlapPart, Window
from harness.run_directory.events import MeasuredEvent
from harness.run_directory.rank_state import ModuleWriter
from harness.run_directory.request import RunRequest, snapshot_file, trace_file

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


class Probes(ProbedSteps):
    """Of the harness's own loop, which says which step and phase it is in."""

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
        self._between = False

    @property
    def within_probed_step(self) -> bool:
        """Whether a probed step is under way."""
        return self._step is not None

    def attach(self, engine: Engine, data: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Read the memory of this engine; `data` yields what the samples keep in memory."""
        self._memory = MemoryProbe(self.allocator, engine, data)
        self._memory.record(0, "after_setup")

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
            self.allocator.relax()  # the probed steps are over
        self._between = not probed
        if self._between:
            self.allocator.reset_peak()
        if window == "timed":
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

    def begin_micro_step(self, *, last: bool) -> None:
        """Tell the counter whether this micro-step is the last of its step."""
        self.counter.begin_micro_step(last=last)

    def phase(self, name: str) -> None:
        """Name what the collectives from here on belong to."""
        self.counter.phase = name

    def counting(self, phase: str) -> AbstractContextManager[None]:
        """Count the collectives of something outside the steps, such as an evaluation, as `phase`."""
        return self.counter.counting(phase)

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

    def step_memory(self) -> dict[str, int | None]:
        """Of the step that has just ended, in the form of `StepEvent`; nothing of a probed one."""
        if not self._between:
            return {}
        return {
            "allocated_bytes": self.allocator.allocated_bytes(),
            "peak_bytes": self.allocator.peak_bytes(),
        }

    def memory_of(self, moment: Moment, steps_taken: int) -> AbstractContextManager[None]:
        """Record the memory of something outside the steps, while the allocator still counts."""
        return self._memory.span(steps_taken, moment) if self._memory else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """What measures and observes a rank while it trains."""

    rank: int
    allocator: AllocatorProbe
    counter: CommunicationCounter
    tracer: Tracer
    observer: Observer
    probes: Probes

    @classmethod
    def install(cls, request: RunRequest, run_directory: Path, world: World) -> Instruments:
        """Install them; call this before the first tensor whose memory counts."""
        measure = request.measure
        allocator = allocator_probe(world.device) if measure.probed_steps else AllocatorProbe()
        if request.memory_limit_bytes is not None and world.device == "cuda":
            allocator.limit(request.memory_limit_bytes)
        of_backend = {base.__module__ for base in type(registry.create(request.backend)).__mro__}
        counter = CommunicationCounter(world.layout, brought_packages(request.job), of_backend)
        tracer = Tracer(world.device, trace_file(run_directory, world.rank) if measure.trace else None)
        snapshot = Snapshot(snapshot_file(run_directory, world.rank)) if measure.memory_snapshot else None
        # Stages of a pipeline hold different modules by design.
        alike = world.mesh.size("pipeline") == 1
        observer = Observer(ModuleWriter(run_directory if alike else None, world.rank))
        probes = Probes(
            allocator,
            counter,
            tracer,
            observer,
            EnergyMeter(world.device),
            probed_steps=measure.probed_steps,
            snapshot=snapshot,
        )
        return cls(
            rank=world.rank,
            allocator=allocator,
            counter=counter,
            tracer=tracer,
            observer=observer,
            probes=probes,
        )

    def before_training(self, request: RunRequest) -> None:
        """Have freed memory kept from now on, and put the limit of memory into force.

        On the CPU no earlier, since models are built on the host; on a device once more, since NCCL has taken
        its part by now.
        """
        keep_freed_memory()
        if request.memory_limit_bytes is not None:
            self.allocator.limit(request.memory_limit_bytes)

    def write(self, events: EventWriter) -> None:
        """Write all that was measured so far."""
        rows, processors, energy = self.tracer.rows, self.probes.processors, self.probes.energy
        measured = self.probes.measured(
            self.rank,
            seconds={"tracer": self.tracer.seconds / len(rows)} if rows else {},
            overlap=[OverlapPart(**row) for row in rows],
            overlap_missing=self.tracer.missing,
            processors=processors.end(),
            energy=energy.end() if energy else None,
        )
        events.write(measured)
