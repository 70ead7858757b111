"""How long the phases of a step last: host clock on the CPU, events of the stream on CUDA.

Neither waits for the device. CUDA's events are read after the step's one synchronisation.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from harness.rank.step_hooks import StepHook
from harness.record import ProcessorPart

PHASES = ("forward", "backward", "step")
"""Of every engine; one that runs a pipeline adds 'waiting', which is in none of them."""


class HostPhaseTimer:
    """The monotonic clock, where operators return when they have finished."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self._since = 0.0

    def enter(self, phase: str | None) -> None:
        """End the phase before and begin `phase`; None: what follows belongs to no phase."""
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call, of all micro-steps, once the device has finished."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


class CudaPhaseTimer:
    """The same by timing events on the current stream; they are kept for the next step."""

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


PhaseTimer = HostPhaseTimer | CudaPhaseTimer


def phase_timer(device: str) -> PhaseTimer:
    """The timer for a device."""
    return CudaPhaseTimer() if device == "cuda" else HostPhaseTimer()


class Clock(StepHook):
    """Seconds of a step, of its phases, and of fetching its batches."""

    def __init__(self, device: str) -> None:
        self.timer = phase_timer(device)
        self._began = self._fetching = self._fetched = self._seconds = 0.0

    def begin(self) -> None:
        self._fetched = 0.0
        self._began = time.perf_counter()

    def enter(self, phase: str, last: bool) -> None:
        # Fetching lies between two phases: a rank that is interrupted here must not count the moment twice.
        if phase == "forward":
            self._fetched += time.perf_counter() - self._fetching
        self.timer.enter(phase if phase in PHASES else None)
        if phase == "data":
            self._fetching = time.perf_counter()

    def end(self) -> None:
        self._seconds = time.perf_counter() - self._began

    def facts(self) -> dict[str, Any]:
        return {"seconds": self._seconds, "data_seconds": self._fetched, "phase_seconds": self.timer.take()}


PROC = Path("/proc")
NANOSECONDS = 1e9
# Columns of the first line of /proc/stat, see proc_stat(5). Time of guests is contained in 'user'.
BUSY_COLUMNS = {"user": 1, "nice": 2, "system": 3, "irq": 6, "softirq": 7}
STOLEN_COLUMN = 8


class ProcessorAccount:
    """What happened between each `begin` and the `rest` or `end` that followed."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._first: dict[str, float] | None = None
        self._counts = False
        self._is_known = True
        self._sums: dict[str, float] = {}

    def begin(self) -> None:
        """Note where the counters stand, unless they count already."""
        if not self._counts:
            self._counts = True
            self._first = read(self._proc)

    def rest(self) -> None:
        """Count no further until the next `begin`."""
        if not self._counts:
            return
        self._counts = False
        last = read(self._proc)
        if self._first is None or last is None:
            self._is_known = False
            return
        for name, seconds in last.items():
            # Threads that ended took their account with them.
            self._sums[name] = self._sums.get(name, 0.0) + max(0.0, seconds - self._first[name])

    def end(self) -> ProcessorPart | None:
        """What was counted; None: nothing was begun, or this system keeps no such accounts."""
        self.rest()
        return ProcessorPart(**self._sums, boot=boot(self._proc)) if self._sums and self._is_known else None


def read(proc: Path = PROC) -> dict[str, float] | None:
    """Seconds counted since this process and machine started, by field of `record.ProcessorPart`.

    None where they are missing or unreadable.
    """
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    ran = waited = 0
    try:
        for task in (proc / "self" / "task").iterdir():
            try:
                of_thread = _ran_and_queued(task)
            except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
                continue
            ran, waited = ran + of_thread[0], waited + of_thread[1]
        columns = (proc / "stat").read_text().split("\n", 1)[0].split()
        busy = sum(int(columns[column]) for column in BUSY_COLUMNS.values())
        stolen = int(columns[STOLEN_COLUMN])
    except (OSError, IndexError, ValueError):
        return None
    if not ran:
        return None
    return {
        "seconds": time.perf_counter(),
        "process_seconds": time.process_time(),
        "waiting_seconds": waited / NANOSECONDS,
        "machine_busy_seconds": busy / ticks_per_second,
        "machine_stolen_seconds": stolen / ticks_per_second,
    }


def accounted_seconds(proc: Path = PROC) -> float | None:
    """For how long the calling thread has run so far, or could have run and waited for a processor.

    None where the system keeps no such account.
    """
    try:
        ran, queued = _ran_and_queued(proc / "thread-self")
    except (OSError, ValueError):
        return None
    # The kernel's own count of running is as old as its last tick.
    return time.thread_time() + queued / NANOSECONDS if ran else None


def _ran_and_queued(task: Path) -> tuple[int, int]:
    """Nanoseconds of a thread on a processor and in its queue (the kernel's sched-stats.rst).

    A kernel without CONFIG_SCHED_INFO shows zeros. Raises OSError of a thread that has ended, and ValueError.
    """
    ran, queued, *_ = task.joinpath("schedstat").read_text().split()
    return int(ran), int(queued)


def boot(proc: Path = PROC) -> str | None:
    """What Linux drew at random when it started: equal for all containers of one machine."""
    try:
        return (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return None
