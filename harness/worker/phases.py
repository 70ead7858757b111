"""How long the phases of a step last: host clock on the CPU, events of the stream on CUDA.

Neither waits for the device. CUDA's events are read after the step's one synchronisation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch

PHASES = ("forward", "backward", "step")
"""Of every engine; one that runs a pipeline adds 'waiting', which is in none of them."""


class PhaseTimer(ABC):
    """Told at each border which phase begins; sums each phase over the micro-steps of a step."""

    @abstractmethod
    def enter(self, phase: str | None) -> None:
        """End the phase before and begin `phase`; None: what follows belongs to no phase."""

    @abstractmethod
    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call, once the device has finished."""


class HostPhaseTimer(PhaseTimer):
    """The monotonic clock, where operators return when they have finished."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self._since = 0.0

    def enter(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


class CudaPhaseTimer(PhaseTimer):
    """Timing events on the current stream; they are kept for the next step."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._phases: list[str | None] = []

    def enter(self, phase: str | None) -> None:
        if len(self._phases) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[len(self._phases)].record()
        self._phases.append(phase)

    def take(self) -> dict[str, float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        for index, phase in enumerate(self._phases[:-1]):
            if phase is not None:
                milliseconds = self._events[index].elapsed_time(self._events[index + 1])
                seconds[phase] = seconds.get(phase, 0.0) + milliseconds / 1e3
        self._phases.clear()
        return seconds


def phase_timer(device: str) -> PhaseTimer:
    """The timer for a device."""
    return CudaPhaseTimer() if device == "cuda" else HostPhaseTimer()
