"""Starts to observe a process of a script, right after it has imported torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from harness.rank.observing.hooks import Apart, Guarded, hook_frameworks, hook_torch
from harness.rank.observing.session import Session
from harness.rank.probes.memory import allocator_probe
from harness.run_directory.observed_record import note_end, note_start
from harness.safe_text import described

OnImport = Callable[[str, Callable[[ModuleType], None]], None]


def start_observing(run_directory: Path, on_import: OnImport, apart: Apart = nullcontext) -> None:
    """Put hooks into torch now and into frameworks once they are imported; they work within `apart()`.

    The CPU's allocator counts from here, before the first tensor; on CUDA its own statistics are read.
    """
    session = Session(run_directory, allocator_probe("cpu"))
    rank = os.environ.get("RANK", "")
    note_start(run_directory, int(rank) if rank.isdecimal() else None, trains=False)
    guarded = Guarded(session, apart)
    session.find_roots(guarded)
    hook_torch(guarded)
    hook_frameworks(guarded, on_import)
    _hook_end(guarded, run_directory, apart)
    _hook_threads(guarded)


def _hook_end(guarded: Guarded, run_directory: Path, apart: Apart) -> None:
    """Finish when the process ends, however it does that."""
    failures: list[BaseException] = []
    shown, leave, process = sys.excepthook, os._exit, os.getpid()

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failures.append(error)
        shown(kind, error, trace)

    def failure() -> BaseException | None:
        """What ends the process; Python keeps it too, in case the script has replaced our hook."""
        return failures[0] if failures else getattr(sys, "last_value", None)

    @wraps(leave)
    def exit_at_once(status: int) -> NoReturn:
        # A watchdog's thread leaves so while the others hang: what could wait is left out there.
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            try:
                with apart():
                    note_end(run_directory, process, status)
            except OSError as error:
                sys.stderr.write(f"harness observe: the exit code is not noted: {described(error)}\n")
            if status == 0 or failure() is not None:
                guarded.finish(failure())
        leave(status)

    sys.excepthook = note
    os._exit = exit_at_once
    atexit.register(lambda: guarded.finish(failure()))


def _hook_threads(guarded: Guarded) -> None:
    """Note exceptions that end a thread: the exit code of the process does not tell of them."""
    shown: Callable[[Any], Any] = threading.excepthook

    def note(arguments: Any) -> None:
        shown(arguments)
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit):
            guarded.note(f"a thread ended with {type(error).__name__}: {described(error)}")

    threading.excepthook = note
