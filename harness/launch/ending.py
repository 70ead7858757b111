"""Ends the processes of a run: the ranks, and what they started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERMINATION_SECONDS = 2.0
"""Within these a rank that is terminated writes what it measured."""


def end_all(processes: Sequence[Any], started: float) -> None:
    """Terminate what still runs, kill what does not listen, reap it, and kill what the ranks started.

    Each rank leads a process group of its own; `started`: seconds since the epoch before the first of them.
    """
    running = [process for process in processes if process.exitcode is None]
    for process in running:
        process.terminate()
        with suppress(OSError):
            os.kill(process.pid, signal.SIGCONT)  # a stopped process would not hear it
    deadline = time.monotonic() + TERMINATION_SECONDS
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in running:
        if process.exitcode is None:
            process.kill()
    for process in running:
        process.join()
    groups = {process.pid for process in processes}
    for other in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(other.pid) in groups and other.create_time() >= started - 1:
                other.kill()


def end_asked(process: Any) -> None:
    """Kill a process that was asked something. One that had others work clears up behind them first."""
    with suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
        for child in started:
            with suppress(psutil.Error):
                child.kill()
        process.join(TERMINATION_SECONDS if started else 0.0)
    process.kill()


def await_end(process: subprocess.Popen[Any], seconds: float) -> None:
    """Leave a process that was told to end so much time for it, then kill it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill_fork_server() -> None:
    """Kill the fork server of this process.

    It would end by itself, but only once its imports are done, and would hold standard error open until then.
    """
    if (server := fork_server()) is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def fork_server() -> int | None:
    """The id of the fork server's process, which multiprocessing has started and waits for itself."""
    found: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    return found


def end_of_fork_server(server: int | None) -> str | None:
    """How a fork server ended that lost a process; None: it runs. Multiprocessing still waits for it."""
    if server is None:
        return None
    how, deadline = "ended", time.monotonic() + TERMINATION_SECONDS
    while server == fork_server():  # its connections close before its end can be seen
        try:
            ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if ended is not None:
            if ended.si_code != os.CLD_EXITED:
                how = f"was killed by {signal.Signals(ended.si_status).name}"
            break
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return f"the fork server (process {server}), which starts processes, {how}"


def adopt_orphans() -> None:
    """Have orphans among this process's descendants become its children, not those of init; Linux only.

    One that began a session of its own, or whose parent ended (a double fork), is in no group that is killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def leaving_none_behind() -> Iterator[None]:
    """End with what was started meanwhile, however it was started, but for the fork server."""
    adopt_orphans()
    resource_tracker.ensure_running()  # it and the fork server serve all that is started
    before = {child.pid for child in psutil.Process().children()}
    try:
        yield
    finally:
        kill_descendants({*before, fork_server()})  # a new one where that of before was killed


def kill_descendants(spared: Collection[int | None] = ()) -> None:
    """Kill the children of this process with all that they started, and reap them.

    `spared`: process ids of children that stay, with what they started.
    """
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.pid in spared:
                continue
            for process in [child, *child.children(recursive=True)]:
                with suppress(psutil.Error):
                    process.kill()
        with suppress(ChildProcessError, psutil.Error):
            child.wait(TERMINATION_SECONDS)


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent is gone; Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
