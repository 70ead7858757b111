"""A rank of a run, all that measures and observes it while it trains, and how that lies around a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.backends import registry
from harness.backends.base import Engine, World
from harness.rank.factories import brought_packages
from harness.rank.live.observer import Audit, Observer
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, Snapshot, StepMemory, allocator_probe
from harness.rank.probes.probes import Probes
from harness.rank.probes.time import Clock
from harness.rank.probes.tracer import Tracer
from harness.rank.probes.weights import Examination
from harness.rank.process.environment import keep_freed_memory
from harness.rank.process.start import SignalThread, Turns
from harness.rank.step_hooks import Step, StepHook, StepHooks
from harness.record import OUTSIDE, OverlapPart
from harness.run_directory.events import EventWriter
from harness.run_directory.rank_state import TURN, ModuleWriter, PositionWriter
from harness.run_directory.request import RunRequest, snapshot_file, trace_file


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What this rank is asked for, and through what it tells how far it is."""

    request: RunRequest
    run_directory: Path
    world: World
    started: float
    """By `time.perf_counter`."""
    events: EventWriter
    position: PositionWriter
    signals: SignalThread
    on_termination: Callable[[], None] | None
    """Called when the rank is asked to terminate while it trains, after it wrote its measurements."""
    turns: Turns | None
    """In which it takes its timed steps; None: it waits for nobody."""


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """What measures and observes a rank while it trains."""

    allocator: AllocatorProbe
    counter: CommunicationCounter
    tracer: Tracer
    observer: Observer
    probes: Probes

    @classmethod
    def install(cls, rank: RankContext) -> Instruments:
        """Install them; call this before the first tensor whose memory counts."""
        request, run_directory, world = rank.request, rank.run_directory, rank.world
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
            allocator, counter, tracer, observer,
            reads_energy=world.device == "cuda", probed_steps=measure.probed_steps, snapshot=snapshot,
        )  # fmt: skip
        return cls(allocator=allocator, counter=counter, tracer=tracer, observer=observer, probes=probes)

    def around(self, engine: Engine, rank: RankContext) -> StepHooks:
        """All of them as the loop tells them: who works within the step lies inside."""
        clock, examined = Clock(rank.world.device), rank.request.examine_steps
        engine.enter_phase = clock.timer.enter
        hooks = [
            Whereabouts(rank.position),
            *([Examination(engine, examined, rank.position, rank.events)] if examined else []),
            Audit(self.observer, engine),
            StepMemory(self.allocator),
            self.observer,
            Tracing(self.tracer, rank.position),
            *([] if rank.turns is None else [TakesTurns(rank.turns, self.probes, rank)]),
            self.probes,
            self.tracer,
            clock,
        ]
        return StepHooks(hooks)

    def before_training(self, request: RunRequest) -> None:
        """Have freed memory kept from now on, and put the limit of memory into force.

        On the CPU no earlier, since models are built on the host; on a device once more, since NCCL has taken
        its part by now.
        """
        keep_freed_memory()
        if request.memory_limit_bytes is not None:
            self.allocator.limit(request.memory_limit_bytes)

    def write(self, rank: RankContext) -> None:
        """Write all that was measured so far."""
        rows, processors, energy = self.tracer.rows, self.probes.processors, self.probes.energy
        measured = self.probes.measured(
            rank.world.rank,
            seconds={"tracer": self.tracer.seconds / len(rows)} if rows else {},
            overlap=[OverlapPart(**row) for row in rows],
            overlap_missing=self.tracer.missing,
            processors=processors.end(),
            energy=energy.read() if energy else None,
        )
        rank.events.write(measured)


class Whereabouts(StepHook):
    """Notes the step and phase that the rank is in, for who finds it stuck."""

    def __init__(self, position: PositionWriter) -> None:
        self._position = position

    def prepare(self, step: Step) -> None:
        self._position.begin_step(step.number)
        self._position.enter("data")

    def enter(self, phase: str, last: bool) -> None:
        # What follows a step counts as its end: one write less, and ahead of who is still within it.
        self._position.enter("step" if phase == OUTSIDE else phase)


class Tracing(StepHook):
    """Turns the profiler on and off; the ranks meet, so that no step waits for another's profiler."""

    def __init__(self, tracer: Tracer, position: PositionWriter) -> None:
        self._tracer, self._position = tracer, position

    def prepare(self, step: Step) -> None:
        self._switch(on=step.window == "traced")

    def finish(self) -> None:
        self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        if on or self._tracer.at_work:
            self._position.enter("trace")
            if on:
                self._tracer.start()
            else:
                self._tracer.stop()
            dist.barrier()


class TakesTurns(StepHook):
    """Waits before a timed step that begins another turn; the ranks then begin together."""

    def __init__(self, turns: Turns, probes: Probes, rank: RankContext) -> None:
        self._turns, self._probes, self._position, self._events = turns, probes, rank.position, rank.events

    def prepare(self, step: Step) -> None:
        if step.window != "timed":
            return
        if self._turns.is_over:
            self._position.enter(TURN)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._probes.rest()
            self._events.write(self._turns.wait())
            dist.barrier()
            self._position.enter("data")
        self._turns.count()
