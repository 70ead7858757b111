"""Watches the positions of ranks: notices when none of them moves any more, and asks where they are."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from harness.launch.idleness import Idleness, Processes
from harness.launch.start_watch import StartWatch
from harness.run_directory.events import Event, SetupEvent, StepEvent
from harness.run_directory.rank_state import read_head, read_position, read_state
from harness.run_directory.request import RunRequest
from harness.run_directory.stuck import StuckNote

STATE_SIGNAL = signal.SIGUSR2
ANSWER_SECONDS = 3.0
"""Within these a rank writes its stacks and collectives."""
LOOK_SECONDS = 1.0
STALL_SECONDS = 10.0
"""If the watcher itself did not run for so long, the machine slept or is overloaded, and nobody is stuck."""
STEPS_REMEMBERED = 101
LEAST_SECONDS = 1800.0
"""A run may last so long, and the next times what its steps need at their pace, unless it has a limit set."""
TIMES_ITS_STEPS = 3.0
SETTLED_SECONDS = 5.0
"""Before that nobody asks what processes do: it takes longer than to look where they are."""


class Watch:
    """Follows the ranks of one run."""

    def __init__(
        self,
        run_directory: Path,
        request: RunRequest,
        processes: Processes = lambda: None,
        sees: Callable[[int], bool] = lambda _rank: True,
    ) -> None:
        """`sees`: whether a rank writes into this folder; the silence of others says nothing."""
        self._run_directory = run_directory
        self._sees = sees
        self._world_size = request.world_size
        self._limits = request.limits
        self._steps: int | None = request.job.training.steps
        """None: rank 0 has not said yet how many an epoch has."""
        self._step_seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._ended_steps: list[float] = []
        """When the first step and the latest were seen to have ended."""
        self._seen_steps = 0
        self._heads: list[bytes] = []
        self._began = self._looked = self._moved = now = time.monotonic()
        self._start = StartWatch(request.world_size, request.limits.start_timeout_seconds, now)
        self._idleness = Idleness(processes)

    def note(self, event: Event) -> None:
        """Learn from an event of rank 0 how long steps are, and how many there will be."""
        if isinstance(event, SetupEvent):
            self._steps = event.steps
        if isinstance(event, StepEvent):
            self._step_seconds.append(event.seconds)
            self._ended_steps = [*self._ended_steps[:1], time.monotonic()]
            self._seen_steps += 1

    def must_end(self) -> StuckNote | None:
        """Why the ranks must be ended; None: they move, or may stand still for a while yet."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        if (reason := self._stuck(now)) is not None:
            return StuckNote(reason=reason)
        if (reason := self._overdue(now)) is not None:
            return StuckNote(kind="Timeout", reason=reason)
        return None

    def _stuck(self, now: float) -> str | None:
        ranks = [rank for rank in range(self._world_size) if self._sees(rank)]
        heads = [read_head(self._run_directory, rank) for rank in ranks]
        if now - self._looked > STALL_SECONDS:
            self._start.forgive(now)
            self._idleness.reset()
            self._moved = now
        if heads != self._heads:
            self._heads, self._moved = heads, now
        self._looked = now
        positions = [read_position(self._run_directory, rank) for rank in ranks]
        self._start.note({r: p.phase if p else None for r, p in zip(ranks, positions, strict=True)}, now)
        waited = now - self._moved
        if self._step_seconds and all(p and p.is_as_long_as_a_step for p in positions):
            limit, words = self._limit_of_steps()
            return f"no rank moved for {waited:.0f} s ({words})" if waited > limit else None
        # Who takes steps has left its start, though a network's file system may show that late.
        late = None if self._step_seconds else self._start.late(now)
        return late or self._outside_of_steps(now, waited)

    def _overdue(self, now: float) -> str | None:
        """Why the whole run has taken too long although its ranks move, in words."""
        taken, given = now - self._began, self._limits.timeout_seconds
        if given is not None:
            return f"runtime.timeout_seconds passed ({given:g})" if taken > given else None
        if self._seen_steps < 2 or self._steps is None:
            return None
        first, latest = self._ended_steps
        needed = self._steps * (latest - first) / (self._seen_steps - 1)
        if taken <= LEAST_SECONDS + TIMES_ITS_STEPS * needed:
            return None
        return (
            f"{taken:.0f} s passed, more than {LEAST_SECONDS:g} s and {TIMES_ITS_STEPS:g} times the "
            f"{needed:.0f} s that its steps need at their pace (runtime.timeout_seconds sets another limit)"
        )

    def _outside_of_steps(self, now: float, waited: float) -> str | None:
        limit, idle_limit = self._limits.phase_timeout_seconds, self._limits.idle_timeout_seconds
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
        step, limits = median(self._step_seconds), self._limits
        steps, seconds = limits.stuck_after_steps, limits.stuck_after_seconds
        # Beyond that a collective gives up by itself, which says less.
        limit = min(steps * step + seconds, limits.phase_timeout_seconds)
        parts = f"{steps:g} steps of {step:.3g} s and {seconds:g} s"
        return limit, f"the limit is {limit:.1f} s: {parts}"


def ask_where(run_directory: Path, processes: Mapping[int, int], note: StuckNote) -> None:
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
    with suppress(OSError):  # a full disk: the record still says so much as the launcher knows
        note.model_copy(update={"stopped_ranks": stopped}).write(run_directory)


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by SIGSTOP or a debugger."""
    try:
        return psutil.Process(process).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
