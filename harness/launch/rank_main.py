"""The first code of a rank that a launcher started: imports nothing heavy before it has its own log."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from socket import socket


def enter_rank(
    run_directory: str, state: str, log: str, variables: dict[str, str], turns: Connection | None,
    store: socket | None,
) -> None:  # fmt: skip
    """Run one rank in this fresh process and leave with its exit code.

    `state`: the file in which it shows where it is. `turns`: through which it is given turns; None: it
    takes none. `store`: of rank 0, which listens there for all.
    """
    from harness.rank.process.start import dump_stacks_when_asked

    _detach(log)
    _follow_the_launcher()
    dump_stacks_when_asked(Path(state))
    os.environ.update(variables)
    from harness.rank.process.start import Turns, leave
    from harness.rank.rank import run_rank
    from harness.run_directory.request import LOCAL_RENDEZVOUS

    if store is not None:
        os.environ[LOCAL_RENDEZVOUS] = str(store.detach())
    leave(run_rank(Path(run_directory), turns=Turns(turns) if turns is not None else None))


def enter_question(function: str, argument: str, log: str, launcher: Connection) -> None:
    """Send what `function` ("module:name") makes of the argument, or what is wrong, and leave."""
    _detach(log)
    _follow_the_launcher()
    from harness.errors import HarnessError
    from harness.rank.process.start import keep_lock_of_bars, leave
    from harness.run_directory.events import tell_through
    from harness.safe_text import described

    tell_through(launcher.send)
    keep_lock_of_bars()
    try:
        launcher.send({"answer": resolve_name(function)(argument)})
    except HarnessError as error:
        launcher.send({"error": described(error)})
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)
    leave(0)


def _detach(log: str) -> None:
    """Own process group, output to the log, nothing that asks the launcher to end."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a step
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # the launcher was interrupted and took its folder away, or the folder became read-only
        from harness.run_directory.assemble import EVENTS_LOST

        os._exit(EVENTS_LOST)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _follow_the_launcher() -> None:
    """End this process when the launcher is gone, however it ended.

    The fork server is no help: it lives as long as any of its children.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    from harness.launch.ending import adopt_orphans, kill_descendants

    adopt_orphans()

    def wait_and_leave() -> None:
        launcher.join()
        kill_descendants()
        os.killpg(0, signal.SIGKILL)  # with what this rank started

    threading.Thread(target=wait_and_leave, daemon=True).start()
