"""A rank as a process: how it starts, waits for its turn, shows its state, and ends. Must not import torch.

A Python handler of a signal would wait for the main thread, which may never return from a collective whose
peer is gone; the interpreter's own C handler writes to a pipe that another thread reads.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from harness.run_directory.events import TurnEvent
from harness.run_directory.rank_state import COLLECTIVES_PREFIX, HEAD_BYTES
from harness.run_directory.request import rank_state


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
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch's flight recorder of gloo, and that of NCCL in builds for CUDA: neither has what the other saw."""


def dump_stacks_when_asked(run_directory: Path, rank: int, *, chain: bool = False) -> None:
    """On STATE_SIGNAL write the Python stacks of all threads behind the rank's position.

    The C handler of `faulthandler` does it, whatever the main thread is blocked in. `chain`: then call the
    handler that is there already.
    """
    try:
        file = rank_state(run_directory, rank).open("ab", buffering=0)
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
        self.on(STATE_SIGNAL, lambda: write_collectives(run_directory, rank))
        dump_stacks_when_asked(run_directory, rank, chain=True)

    def note_collectives(self) -> None:
        """Write what this rank waits in without being asked."""
        self._actions.get(STATE_SIGNAL, lambda: None)()

    def answer_signals(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                action = self._actions.get(number)
                if action is not None:
                    action()


def write_collectives(run_directory: Path, rank: int) -> None:
    """Append what torch's flight recorders know: the oldest collective that has not ended, and counts.

    They keep the latest collectives of gloo and NCCL; nothing before torch is loaded.
    """
    records = []
    for name in RECORDERS if "torch.distributed" in sys.modules else ():
        try:
            document = json.loads(getattr(sys.modules["torch"]._C._distributed_c10d, name)())
        except (AttributeError, RuntimeError, ValueError, TypeError):  # a build without it
            continue
        if isinstance(document, dict):
            records.append(document)
    line = COLLECTIVES_PREFIX + json.dumps(summarise(records)) + "\n"
    try:
        with rank_state(run_directory, rank).open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError:
        return


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pending collective in words and the collectives begun per group, of one record per transport."""
    pending = [entry for record in records for entry in _pending(record.get("entries") or [])]
    enqueued: Counter[str] = Counter()
    for record in records:
        for group, status in (record.get("pg_status") or {}).items():
            enqueued[group] += max(0, int(status.get("last_enqueued_collective", 0)))
    oldest = min(pending, key=lambda entry: int(entry.get("time_created_ns", 0)), default=None)
    if oldest is None:
        return {"pending": None, "enqueued": dict(enqueued)}
    name = str(oldest.get("profiling_name", "a collective")).replace(":", " ")
    number = oldest.get("p2p_seq_id" if oldest.get("is_p2p") else "collective_seq_id")
    shapes = ", ".join("x".join(map(str, s)) or "scalar" for s in (oldest.get("input_sizes") or [])[:4])
    dtypes = ", ".join(dict.fromkeys(map(str, oldest.get("input_dtypes") or [])))
    group = ", ".join(map(str, oldest.get("process_group") or []))
    words = f"{name} number {number} of group {group} ({shapes} {dtypes})"
    return {"pending": words, "enqueued": dict(enqueued)}


def _pending(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries that have not ended, oldest first.

    ProcessGroupNCCL notes the operations of a coalesced batch without work that could end them; the batch
    itself ends (torch 2.13, ProcessGroupNCCL.cpp, endCoalescing). Operations of a group end in order, so that
    what one that has ended follows has ended too.
    """
    waiting: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for entry in entries:
        of_queue = waiting.setdefault((str(entry.get("process_group")), bool(entry.get("is_p2p"))), [])
        if entry.get("retired"):
            of_queue.clear()
        else:
            of_queue.append(entry)
    return [entry for of_queue in waiting.values() for entry in of_queue]


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
