"""Runs a small process next to a rank that notes how the rank ended, whatever launcher started it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from harness.atomic_write import write_atomically
from harness.run_directory.request import RankExit, rank_exit

PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def run_monitored(run_directory: Path, rank: int, main: Callable[[], int]) -> NoReturn:
    """Run `main` in a child of this process and leave as it did, its exit noted in the run directory.

    Launchers tell on their standard error only how a rank died. Call this before anything starts threads
    or touches a device: the child is a fork. SIGTERM is passed on.
    """
    parent = os.getpid()
    # Held back until they can be passed on: one that arrives around the fork would end this process alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        die_with(parent, signal.SIGKILL)
        os._exit(main())

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    note = RankExit(exit_code=code, at=time.time(), max_resident_bytes=usage.ru_maxrss * 1024)
    write_atomically(rank_exit(run_directory, rank), note.model_dump_json())
    os._exit(code if code >= 0 else 128 - code)


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent is gone; Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
