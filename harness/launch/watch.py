"""Watches the positions of ranks: notices when none of them moves any more, and asks where they are."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from harness.launch.idleness import Idleness, Processes
from harness.launch.start_watch import StartWatch
from harness.run_directory.events import Event, StepEvent
from harness.run_directory.rank_state import read_head, read_position, read_state
from harness.run_directory.stuck import StuckNote

STATE_SIGNAL = signal.SIGUSR2
ANSWER_SECONDS = 3.0
"""Within these a rank writes its stacks and collectives."""
LOOK_SECONDS = 1.0
STALL_SECONDS = 10.0
"""If the watcher itself did not run for so long, the machine slept or is overloaded, and nobody is stuck."""
STEPS_REMEMBERED = 101
SETTLED_SECONDS = 5.0
"""Before that nobody asks what processes do: it takes longer than to look where they are."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long ranks may stand still."""

    steps: float = 10.0
    """Median training steps, to which `seconds` are added."""
    seconds: float = 30.0
    phase_seconds: float = 570.0
    """Outside of training steps and evaluations, and before a step has been timed: start, checkpoint."""
    start_seconds: float = 60.0
    """In a phase of the start that other ranks have left; at least three times as long as they needed."""
    idle_seconds: float = 60.0
    """The same as `phase_seconds` where no rank computes, reads or writes either."""


class Watch:
    """Follows the ranks of one run."""

    def __init__(
        self,
        run_directory: Path,
        world_size: int,
        patience: Patience,
        processes: Processes = lambda: None,
    ) -> None:
        self._run_directory = run_directory
        self._world_size = world_size
        self._patience = patience
        self._step_seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._heads: list[bytes] = []
        self._looked = self._moved = now = time.monotonic()
        self._start = StartWatch(world_size, patience.start_seconds, now)
        self._idleness = Idleness(processes)

    def note(self, event: Event) -> None:
        """Learn from an event of rank 0 how long steps are."""
        if isinstance(event, StepEvent):
            self._step_seconds.append(event.seconds)

    def stuck(self) -> str | None:
        """Why the ranks must be ended, in words; None: they move, or may stand still for a while yet."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        ranks = range(self._world_size)
        heads = [read_head(self._run_directory, rank) for rank in ranks]
        if now - self._looked > STALL_SECONDS:
            self._start.forgive(now)
            self._idleness.reset()
            self._moved = now
        if heads != self._heads:
            self._heads, self._moved = heads, now
        self._looked = now
        positions = [read_position(self._run_directory, rank) for rank in ranks]
        self._start.note({rank: p.phase if (p := positions[rank]) else None for rank in ranks}, now)
        waited = now - self._moved
        if self._step_seconds and all(position and position.is_as_long_as_a_step for position in positions):
            limit, words = self._limit_of_steps()
            return f"no rank moved for {waited:.0f} s ({words})" if waited > limit else None
        return self._start.late(now) or self._outside_of_steps(now, waited)

    def _outside_of_steps(self, now: float, waited: float) -> str | None:
        limit, idle_limit = self._patience.phase_seconds, self._patience.idle_seconds
        if waited > limit:
            return f"no rank moved for {waited:.0f} s (runtime.phase_timeout_seconds is {limit:g})"
        if waited < min(SETTLED_SECONDS, idle_limit / 2):
            self._idleness.reset()
            return None
        idle = self._idleness.seconds(now)
        if idle < idle_limit:
            return None
        return (
            f"no rank moved, computed, read or wrote for {idle:.0f} s (runtime.idle_timeout_seconds is "
            f"{idle_limit:g})"
        )

    def _limit_of_steps(self) -> tuple[float, str]:
        patience = self._patience
        step = median(self._step_seconds)
        # Beyond that a collective gives up by itself, which says less.
        limit = min(patience.steps * step + patience.seconds, patience.phase_seconds)
        parts = f"{patience.steps:g} steps of {step:.3g} s and {patience.seconds:g} s"
        return limit, f"the limit is {limit:.1f} s: {parts}"


def ask_where(run_directory: Path, processes: Mapping[int, int], reason: str) -> StuckNote:
    """Have each rank in `processes` (who live) write its stacks and collectives; note who could not."""
    stopped = [rank for rank, process in processes.items() if is_stopped(process)]
    asked = [rank for rank in processes if rank not in stopped]
    for rank in asked:
        with suppress(OSError):
            os.kill(processes[rank], STATE_SIGNAL)
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        if all(read_state(run_directory, rank).has_answered for rank in asked):
            break
        time.sleep(0.05)
    note = StuckNote(reason=reason, stopped_ranks=stopped)
    with suppress(OSError):  # a full disk: the record still says so much as the launcher knows
        note.write(run_directory)
    return note


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by SIGSTOP or a debugger."""
    try:
        return psutil.Process(process).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
