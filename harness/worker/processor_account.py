"""Who used the processors while steps were timed: this rank, other programs or the hypervisor's other guests.

From Linux's own accounts, read twice per run and never within a step. Knows no torch.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from harness.record import ProcessorPart

PROC = Path("/proc")
NANOSECONDS = 1e9
# Columns of the first line of /proc/stat, see proc_stat(5). Time of guests is contained in 'user'.
BUSY_COLUMNS = {"user": 1, "nice": 2, "system": 3, "irq": 6, "softirq": 7}
STOLEN_COLUMN = 8


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Seconds counted since this machine or process started."""

    clock: float
    process: float
    waiting: float
    busy: float
    stolen: float


class ProcessorAccount:
    """What happened between `begin` and `end`."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._first: Reading | None = None
        self._has_begun = False

    def begin(self) -> None:
        """Note where the counters stand; only the first call counts."""
        if not self._has_begun:
            self._has_begun = True
            self._first = read(self._proc)

    def end(self) -> ProcessorPart | None:
        """What was counted since; None: nothing was begun, or this system keeps no such accounts."""
        first = self._first
        last = read(self._proc) if first is not None else None
        if first is None or last is None:
            return None
        return ProcessorPart(
            seconds=last.clock - first.clock,
            process_seconds=last.process - first.process,
            # Threads that ended took their account with them.
            waiting_seconds=max(0.0, last.waiting - first.waiting),
            machine_busy_seconds=last.busy - first.busy,
            machine_stolen_seconds=last.stolen - first.stolen,
            boot=boot(self._proc),
        )


def read(proc: Path = PROC) -> Reading | None:
    """The counters of this process and of its machine; None where they are missing or unreadable."""
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    try:
        waiting = _waiting_seconds(proc / "self" / "task")
        columns = (proc / "stat").read_text().split("\n", 1)[0].split()
        busy = sum(int(columns[column]) for column in BUSY_COLUMNS.values())
        stolen = int(columns[STOLEN_COLUMN])
    except (OSError, IndexError, ValueError):
        return None
    if waiting is None:
        return None
    return Reading(
        clock=time.perf_counter(),
        process=time.process_time(),
        waiting=waiting,
        busy=busy / ticks_per_second,
        stolen=stolen / ticks_per_second,
    )


def _waiting_seconds(tasks: Path) -> float | None:
    """Of all threads together: could have run and waited for a processor; None if nothing is counted.

    The first two numbers of each account are nanoseconds on a processor and in its queue (the kernel's
    sched-stats.rst). A kernel without CONFIG_SCHED_INFO shows zeros.
    """
    ran, waited = 0, 0
    for task in tasks.iterdir():
        try:
            counts = task.joinpath("schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
            continue
        ran += int(counts[0])
        waited += int(counts[1])
    return waited / NANOSECONDS if ran else None


def boot(proc: Path = PROC) -> str | None:
    """What Linux drew at random when it started: equal for all containers of one machine."""
    try:
        return (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return None
