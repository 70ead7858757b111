"""A rank as a process: how it starts, waits for its turn, shows its state, and ends. Must not import torch.

A Python handler of a signal would wait for the main thread, which may never return from a collective whose
peer is gone; the interpreter's own C handler writes to a pipe that another thread reads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from harness.run_directory.events import TurnEvent, is_of_lost_peer
from harness.run_directory.rank_state import COLLECTIVES_PREFIX, HEAD_BYTES
from harness.run_directory.request import rank_state
from harness.snapshots.flight_recorder import KEPT, dump_of


def leave(code: int) -> NoReturn:
    """End the process without static destructors.

    About 2 % of DeepSpeed runs on gloo die in them after their work is done ('terminate called without
    an active exception'), which would turn a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_lock_of_bars() -> None:
    """Give tqdm a lock of threads in place of its semaphore between processes.

    A rank leaves without finalisers, so that Python would warn of the semaphore as leaked when the launcher
    ends; transformers shows bars while it loads weights, datasets while it prepares them.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


STATE_SIGNAL = signal.SIGUSR2
"""Asks a rank for its stacks and collectives."""
RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""torch's flight recorder of gloo, and that of NCCL in builds for CUDA: neither has what the other saw."""
MOST_STACKS = 50


def dump_stacks_when_asked(state: Path, *, chain: bool = False) -> None:
    """On STATE_SIGNAL write the Python stacks of all threads behind the rank's position, in that file.

    The C handler of `faulthandler` does it, whatever the main thread is blocked in. `chain`: then call the
    handler that is there already.
    """
    try:
        file = state.open("ab", buffering=0)
    except OSError:
        signal.signal(STATE_SIGNAL, signal.SIG_IGN)  # by default it would end the rank
        return
    faulthandler.enable(file=2, all_threads=False)  # who aborts in a library says where
    missing = HEAD_BYTES - file.tell()
    if missing > 0:
        file.write(b" " * (missing - 1) + b"\n")
    faulthandler.register(STATE_SIGNAL, file=file, all_threads=True, chain=chain)


class SignalThread:
    """Answers signals on a thread of its own. Make it on the main thread."""

    def __init__(self) -> None:
        self._actions: dict[int, Callable[[], None]] = {}
        self._rank: tuple[Path, int] | None = None
        self._crash: Crash | None = None
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self.answer_signals, args=(reader,), daemon=True).start()

    def on(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` for each of these signals. Call this on the main thread."""
        self._actions[number] = action
        signal.signal(number, lambda _signal, _frame: None)

    def on_termination(self, tell: Callable[[], None]) -> None:
        """On SIGTERM call `tell` and leave with exit code 143."""

        def tell_and_leave() -> None:
            try:
                tell()
            finally:
                os._exit(128 + signal.SIGTERM)

        self.on(signal.SIGTERM, tell_and_leave)

    def on_state_asked(self, run_directory: Path, rank: int) -> None:
        """Add the collectives to the stacks that `dump_stacks_when_asked` writes."""
        faulthandler.unregister(STATE_SIGNAL)
        self._rank = run_directory, rank
        self._crash = Crash(lambda: write_where(run_directory, rank))
        self.on(STATE_SIGNAL, lambda: write_collectives(run_directory, rank))
        dump_stacks_when_asked(rank_state(run_directory, rank), chain=True)

    def note_collectives(self, failure: BaseException) -> None:
        """Write what this rank, which it ends, waits in without being asked."""
        if self._rank is not None:
            write_collectives(*self._rank, failure)

    def answer_signals(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                action = self._actions.get(number)
                if action is not None:
                    action()


class Crash:
    """Has C++ that ends this process call a function first: gloo does so on a thread of its own where ranks
    give other sizes, and no signal leaves the time for it."""

    def __init__(self, tell: Callable[[], None]) -> None:
        process = os.getpid()

        def tell_and_end() -> None:
            self.forget()
            if os.getpid() == process:
                tell()
            if self._before:
                ctypes.CFUNCTYPE(None)(self._before)()

        self._before: int | None = None
        self._tell = ctypes.CFUNCTYPE(None)(tell_and_end)
        with suppress(OSError, AttributeError):  # another C++ library
            self._set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
            self._set_terminate.restype, self._set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            self._before = self._set_terminate(self._tell)

    def forget(self) -> None:
        """Python's end comes before that of C++."""
        if self._before:
            self._set_terminate(self._before)


def write_where(run_directory: Path, rank: int) -> None:
    """Append what all threads do and what this rank waits in to its state."""
    with suppress(OSError), rank_state(run_directory, rank).open("ab", buffering=0) as file:
        faulthandler.dump_traceback(file)
    write_collectives(run_directory, rank)


def write_collectives(run_directory: Path, rank: int, failure: BaseException | None = None) -> None:
    """Keep what torch's flight recorders know, and append the oldest collective that has not ended.

    They have the latest collectives of gloo and NCCL; nothing before torch is loaded.
    failure: what ends the rank.
    """
    documents = []
    for name in RECORDERS if "torch.distributed" in sys.modules else ():
        try:
            documents.append(pickle.loads(getattr(sys.modules["torch"]._C._distributed_c10d, name)()))
        except (AttributeError, RuntimeError, ValueError, pickle.UnpicklingError):  # a build without it
            continue
    gives_up = failure is not None and is_of_lost_peer(type(failure).__name__, str(failure))
    document = merged(documents, gives_up=gives_up)
    waits = dump_of(document, rank).open
    line = COLLECTIVES_PREFIX + json.dumps({"pending": waits[0].words if waits else None}) + "\n"
    with suppress(OSError):
        if document["entries"]:
            (run_directory / KEPT.replace("*", f"{rank:05d}")).write_text(json.dumps(document))
        with rank_state(run_directory, rank).open("ab", buffering=0) as file:
            for frame in reversed(traceback.extract_tb(failure.__traceback__) if failure else []):
                file.write(f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n'.encode())
            file.write(line.encode())


def merged(documents: Sequence[dict[str, Any]], *, gives_up: bool = False) -> dict[str, Any]:
    """The collectives of all transports; of those long over without their stacks.

    gives_up: whether the rank ends for a peer that did not come. Where all its collectives seem to have ended
    it waited in the last: gloo marks one that timed out as it does one that ended (torch 2.13).
    """
    entries = [entry for document in documents for entry in document.get("entries") or []]
    groups = {name: of for d in documents for name, of in (d.get("pg_config") or {}).items() if name}
    if gives_up and all(entry.get("retired") for entry in entries):
        for entry in entries[-1:]:
            entry["retired"] = False
    for entry in entries[:-MOST_STACKS]:
        if entry.get("retired"):
            entry.pop("frames", None)
    return {"version": next((d["version"] for d in documents if "version" in d), ""),
            "pg_config": groups, "entries": entries}  # fmt: skip


class Turns:
    """Those that the launcher gives this rank."""

    def __init__(self, launcher: Connection) -> None:
        self._launcher = launcher
        self._left = 0
        self.before_first: Callable[[], None] = lambda: None
        """Writes what was measured, which then outlives a rank that is killed in a turn."""

    @property
    def is_over(self) -> bool:
        """Whether the next timed step belongs to another turn."""
        return self._left == 0

    def count(self) -> None:
        self._left -= 1

    def wait(self) -> TurnEvent:
        """Tell the launcher that this rank waits, and sleep in `read` until it answers."""
        self.before_first()
        self.before_first = lambda: None
        begin, used = time.perf_counter(), time.process_time()
        self._launcher.send_bytes(b"")
        turn = TurnEvent.model_validate_json(self._launcher.recv_bytes())
        self._left = turn.steps
        return turn.model_copy(
            update={
                "waited_seconds": round(time.perf_counter() - begin, 9),
                "waited_process_seconds": round(time.process_time() - used, 9),
            }
        )
