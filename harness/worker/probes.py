"""Memory and communication of the counted steps; silent in every other step.

What the probes cost is measured by their own clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from backends.base import Engine
from harness.record import Moment, Window
from harness.worker.communication import CommunicationCounter
from harness.worker.memory import AllocatorProbe, live_bytes_by_kind


class Probes:
    """Attached to one engine; the loop says which step and phase it is in."""

    def __init__(self, allocator: AllocatorProbe, counter: CommunicationCounter) -> None:
        self.allocator = allocator
        self.counter = counter
        self.memory: list[dict[str, Any]] = []
        self.timed_probes: set[str] = set()
        """Probes found at work in a timed step."""
        self._seconds: dict[str, float] = {}
        self._counted_steps = 0
        self._counter_seconds = 0.0
        self._engine: Engine | None = None
        self._step: int | None = None

    @property
    def within_counted_step(self) -> bool:
        """Whether a counted step is under way."""
        return self._step is not None

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def begin_step(self, step: int, window: Window) -> None:
        """Start a step; memory and communication are recorded only in the counted window."""
        counted = window == "counted"
        self._step = step if counted else None
        if counted:
            self._counted_steps += 1
            self.counter.start()
            self._counter_seconds = self.counter.seconds
            self.allocator.reset_peak()
        elif window != "warmup":
            self.allocator.release()  # the counted steps are over
        if window == "timed":
            self.timed_probes |= {
                name
                for name, probe in (("counter", self.counter), ("allocator", self.allocator))
                if probe.at_work
            }

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
        with self._costing("allocator"):
            allocated, peak = self.allocator.allocated_bytes(), self.allocator.peak_bytes()
        with self._costing("memory_walk"):
            kinds = live_bytes_by_kind(self._engine.state_tensors())
        self.memory.append(
            {
                "step": self._step,
                "moment": name,
                "allocated_bytes": allocated,
                "peak_bytes": peak,
                "kinds": kinds,
            }
        )
        with self._costing("allocator"):
            self.allocator.reset_peak()

    def end_step(self) -> None:
        if self._step is not None:
            self._add_cost("counter", self.counter.seconds - self._counter_seconds)
        self.counter.stop()
        self._step = None

    def seconds_per_step(self) -> dict[str, float]:
        """What each probe cost by its own clock, per counted step."""
        return {name: seconds / self._counted_steps for name, seconds in self._seconds.items()}

    @contextmanager
    def _costing(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._add_cost(name, time.perf_counter() - begin)

    def _add_cost(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
