"""The probes of one rank as one set: made before the process group, written as one event."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.backends.base import World
from harness.record import CommunicationPart, MemoryPart, OverlapPart
from harness.run_directory.events import MeasuredEvent
from harness.run_directory.request import RunRequest, snapshot_file, trace_file
from harness.worker.communication import CommunicationCounter
from harness.worker.energy import EnergyMeter
from harness.worker.environment import keep_freed_memory
from harness.worker.events import EventWriter
from harness.worker.memory import (
    AllocatorProbe,
    NoAllocatorProbe,
    allocator_probe,
    host_peak_bytes,
)
from harness.worker.observer import Observer
from harness.worker.probes import Probes
from harness.worker.snapshot import Snapshot
from harness.worker.tracer import Tracer


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
        allocator = allocator_probe(world.device) if measure.probed_steps else NoAllocatorProbe()
        if request.memory_limit_bytes is not None and world.device == "cuda":
            allocator.limit(request.memory_limit_bytes)
        counter = CommunicationCounter(world.layout)
        tracer = Tracer(world.device, trace_file(run_directory, world.rank) if measure.trace else None)
        snapshot = Snapshot(snapshot_file(run_directory, world.rank)) if measure.memory_snapshot else None
        observer = Observer()
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
        """Have freed memory kept from now on, and put the limit of a CPU run into force.

        No earlier, since models are built on the host.
        """
        keep_freed_memory()
        if request.memory_limit_bytes is not None and request.device == "cpu":
            self.allocator.limit(request.memory_limit_bytes)

    def write(self, events: EventWriter) -> None:
        """Write all that was measured so far."""
        measured = MeasuredEvent(
            memory=[MemoryPart(**row) for row in self.probes.memory],
            communication=[CommunicationPart(rank=self.rank, **row) for row in self.counter.rows()],
            early_reduced_bytes=self.counter.early_reduced_bytes,
            overlap=[OverlapPart(**row) for row in self.tracer.rows],
            overlap_missing=self.tracer.missing,
            probe_seconds=self.probes.seconds_per_step() | self._tracer_seconds(),
            timed_probes=sorted(self.probes.timed_probes),
            reserved_bytes=self.allocator.reserved_peak_bytes(),
            num_alloc_retries=self.allocator.allocation_retries(),
            host_peak_bytes=host_peak_bytes(),
            processors=self.probes.processors.end(),
            energy=self.probes.energy.end() if self.probes.energy else None,
        )
        events.write(measured)

    def _tracer_seconds(self) -> dict[str, float]:
        rows = self.tracer.rows
        return {"tracer": self.tracer.seconds / len(rows)} if rows else {}
