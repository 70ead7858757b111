"""Memory and communication of the counted steps; silent in every other step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from backends.base import Engine
from harness.record import Moment
from harness.worker.communication import CommunicationCounter
from harness.worker.memory import AllocatorProbe, live_bytes_by_kind


class Probes:
    """Attached to one engine; the loop says which step and phase it is in."""

    def __init__(self, allocator: AllocatorProbe, counter: CommunicationCounter) -> None:
        self.allocator = allocator
        self.counter = counter
        self.memory: list[dict[str, Any]] = []
        self._engine: Engine | None = None
        self._step: int | None = None

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def begin_step(self, step: int, *, counted: bool) -> None:
        """Start a step; memory and communication are recorded only while `counted`."""
        self._step = step if counted else None
        if counted:
            self.counter.start()
            self.allocator.reset_peak()
        elif self.memory:
            self.allocator.release()  # the counted steps are over

    def phase(self, name: str) -> None:
        """Name what the collectives from here on belong to."""
        self.counter.phase = name

    def counting(self, phase: str) -> AbstractContextManager[None]:
        """Count the collectives of something outside the steps, such as an evaluation, as `phase`."""
        return self.counter.counting(phase)

    def moment(self, name: Moment) -> None:
        """Record allocated, peak and live bytes at this moment of a counted step."""
        if self._step is None or self._engine is None:
            return
        self.memory.append(
            {
                "step": self._step,
                "moment": name,
                "allocated_bytes": self.allocator.allocated_bytes(),
                "peak_bytes": self.allocator.peak_bytes(),
                "kinds": live_bytes_by_kind(self._engine.state_tensors()),
            }
        )
        self.allocator.reset_peak()

    def end_step(self) -> None:
        self.counter.stop()
        self._step = None
