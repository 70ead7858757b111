"""Watches the positions of ranks: notices when none of them moves any more, and asks where they are."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from harness.run_directory.events import Event, SetupEvent, StepEvent
from harness.run_directory.rank_state import STILL_SECONDS, StuckNote, read_head, read_position, read_state
from harness.run_directory.request import RunRequest

IDLE_SHARE = 0.1
"""Of one processor: what helper threads take while the rank itself waits. The one that samples memory in
set-up was seen to take 4 % and to read 0.26 MB/s from /proc."""
IDLE_SECONDS = 0.2
IDLE_BYTES = 2**20
"""What waiting ranks may read and write meanwhile: warnings of libraries."""

Processes = Callable[[], Mapping[int, int] | None]
"""Process ids of the living ranks; None: not all of them are on this machine."""


@dataclass(frozen=True)
class _Usage:
    """Of a rank and the processes that it started."""

    processor_seconds: float
    moved_bytes: int
    wants_to_go_on: bool
    """Whether a main thread had a processor, waited for one, or for a disk."""


class Idleness:
    """Of the ranks of one run, from the first call of `seconds` on."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._since: float | None = None
        self._before: dict[int, _Usage] = {}
        self._wanted: set[int] = set()
        """Ranks that wanted to go on at the last look; who does at two has work, though none of it got done.
        One look may meet a thread that only wakes up to wait on."""

    def reset(self) -> None:
        """Begin anew with the next call of `seconds`."""
        self._since = None

    def seconds(self, now: float) -> float:
        """For how long no rank has done anything, as far as is known; 0 where that cannot be known."""
        processes = self._processes()
        if not processes:
            self._since = None
            return 0.0
        usage = {rank: _usage(process) for rank, process in processes.items()}
        wanted = {rank for rank, of_rank in usage.items() if of_rank.wants_to_go_on}
        still, self._wanted, since = wanted & self._wanted, wanted, self._since
        if since is None or usage.keys() != self._before.keys():
            self._since, self._before = now, usage
            return 0.0
        for rank, after in usage.items():
            # A process that ended takes its share with it: any change counts.
            computed = abs(after.processor_seconds - self._before[rank].processor_seconds)
            moved = abs(after.moved_bytes - self._before[rank].moved_bytes)
            if still or computed > IDLE_SECONDS + IDLE_SHARE * (now - since) or moved > IDLE_BYTES:
                self._since, self._before = now, usage
                return 0.0
        return now - since


def _usage(process: int) -> _Usage:
    seconds, moved, wants_to_go_on = 0.0, 0, False
    try:
        rank = psutil.Process(process)
        family = [rank, *rank.children(recursive=True)]
    except psutil.Error:
        return _Usage(seconds, moved, wants_to_go_on)
    for member in family:
        try:
            times, counters = member.cpu_times(), member.io_counters()
            wants_to_go_on |= member.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        except psutil.Error:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
        # Not `read_chars`, which counts /proc. What is read from a cache takes processor time; what a network
        # brings is written to files.
        moved += counters.write_chars + counters.read_bytes + counters.write_bytes
    return _Usage(seconds, moved, wants_to_go_on)


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
        self._rested, self._rests_since = 0.0, 0.0
        self._began = self._looked = self._moved = self._now()
        self._idleness = Idleness(processes)

    def note(self, event: Event) -> None:
        """Learn from an event of rank 0 how long steps are, and how many there will be."""
        if isinstance(event, SetupEvent):
            self._steps = event.steps
        if isinstance(event, StepEvent):
            self._step_seconds.append(event.seconds)
            self._ended_steps = [*self._ended_steps[:1], self._now()]
            self._seen_steps += 1

    def rest(self) -> None:
        """The ranks wait for their turn: its time does not count."""
        self._rests_since = time.monotonic()

    def go_on(self) -> None:
        """They have their turn."""
        self._rested += time.monotonic() - self._rests_since
        self._idleness.reset()

    def _now(self) -> float:
        return time.monotonic() - self._rested

    def still(self) -> StuckNote | None:
        """That no rank has moved for a while, though it need not be stuck yet; None: they move."""
        waited = self._now() - self._moved
        if waited < STILL_SECONDS:
            return None
        return StuckNote(reason=f"no rank made progress for {waited:.0f} s")

    def must_end(self) -> StuckNote | None:
        """Why the ranks must be ended; None: they move, or may stand still for a while yet."""
        now = self._now()
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
            self._idleness.reset()
            self._moved = now
        if heads != self._heads:
            self._heads, self._moved = heads, now
        self._looked = now
        positions = [read_position(self._run_directory, rank) for rank in ranks]
        waited = now - self._moved
        if self._step_seconds and all(p and p.is_as_long_as_a_step for p in positions):
            step, limits = median(self._step_seconds), self._limits
            steps, seconds = limits.stuck_after_steps, limits.stuck_after_seconds
            # Beyond that a collective gives up by itself, which says less.
            limit = min(steps * step + seconds, limits.phase_timeout_seconds)
            if waited <= limit:
                return None
            parts = f"{steps:g} steps of {step:.3g} s and {seconds:g} s"
            return f"no rank made progress for {waited:.0f} s (the limit is {limit:.1f} s: {parts})"
        return self._outside_of_steps(now, waited)

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
            return f"no rank made progress for {waited:.0f} s (runtime.phase_timeout_seconds is {limit:g})"
        if waited < min(SETTLED_SECONDS, idle_limit / 2):
            self._idleness.reset()
            return None
        idle = self._idleness.seconds(now)
        if idle < idle_limit:
            return None
        return (
            f"no rank made progress, computed, read or wrote for {idle:.0f} s "
            f"(runtime.idle_timeout_seconds is {idle_limit:g})"
        )


def ask_where(run_directory: Path, processes: Mapping[int, int], note: StuckNote | None = None) -> None:
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
    if note is not None:
        with suppress(OSError):  # a full disk: the record still says so much as the launcher knows
            note.model_copy(update={"stopped_ranks": stopped}).write(run_directory)


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by SIGSTOP or a debugger."""
    try:
        return psutil.Process(process).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
